"""Checkpoints: whole or not there. Written beside, fsynced, renamed; a checksummed manifest in each, LATEST last.

RUN/checkpoints/version-000012/
    engine/         the train engine's state (torch.distributed.checkpoint)
    model/          config and tokenizer, so that the folder can be exported by itself
    ledger.json     every held sample: prompt, state, finished segments and results
    config.yaml     the run's configuration
    manifest.json   version, counts, and bytes and SHA-256 of every other file
RUN/checkpoints/LATEST
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from pathlib import Path

import msgspec

from millrace import codec
from millrace.errors import CheckpointError
from millrace.pipeline import ownership
from millrace.ports import TrainEngine
from millrace.schedule.ledger import LedgerSnapshot
from millrace.types import PolicyVersion

_HEAD = 1000
"""Bytes of ledger.json that hold its counts, which come before its slots."""
_ASIDE = ".replaced-"
_NAME = re.compile(rf"({re.escape(_ASIDE)})?version-(\d+)")


class FileEntry(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint is, and what it must consist of."""

    format: int
    version: int
    local_steps: int
    admitted: int
    retired: int
    files: dict[str, FileEntry]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self.folder = run_dir / "checkpoints"
        self._run_dir = run_dir
        self._keep = keep

    async def save(self, snapshot: LedgerSnapshot, engine: TrainEngine) -> Path:
        """Write one cut. A crash at any moment leaves the previous checkpoint as it was."""
        await self.begin(snapshot, engine, staged=False)
        return await self.finish(snapshot, engine)

    async def begin(self, snapshot: LedgerSnapshot, engine: TrainEngine, *, staged: bool) -> None:
        """Have the engine save its state. If `staged`, it may step at once; `finish` comes before the next `begin`."""
        for left in [
            *self.folder.glob(".writing-*"),
            *set(self.folder.glob(f"{_ASIDE}*")).difference(self.all()),
        ]:
            ownership.remove(left)  # what a crash has left
        folder = self._beside(snapshot) / "engine"
        folder.mkdir(parents=True)
        await engine.save(str(folder), staged)

    async def finish(self, snapshot: LedgerSnapshot, engine: TrainEngine) -> Path:
        """Wait for what `begin` began, and make the checkpoint whole."""
        await engine.saved()
        return await asyncio.to_thread(self._finish, snapshot)

    def _beside(self, snapshot: LedgerSnapshot) -> Path:
        return self.folder / f".writing-{snapshot.version:06d}"

    def _finish(self, snapshot: LedgerSnapshot) -> Path:
        beside, final = self._beside(snapshot), self.folder / f"version-{snapshot.version:06d}"
        shutil.copytree(
            self._run_dir / "model",
            beside / "model",
            ignore=shutil.ignore_patterns("*.safetensors", "*.bin"),
        )
        shutil.copy(self._run_dir / "config.yaml", beside / "config.yaml")
        if not any(p.is_file() for p in (beside / "engine").rglob("*")):
            raise CheckpointError(
                f"{beside / 'engine'}: the train engine wrote nothing here. Fix: a run folder that all nodes share"
            )
        (beside / "ledger.json").write_bytes(codec.to_json(snapshot))
        files = {
            str(p.relative_to(beside)): _entry(p) for p in sorted(beside.rglob("*")) if p.is_file()
        }
        manifest = Manifest(
            1, snapshot.version, snapshot.local_steps, snapshot.admitted, snapshot.retired, files
        )
        (beside / "manifest.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        )
        for path in [*beside.rglob("*"), beside]:
            _sync(path)
        if final.exists():  # the same version, saved again: `all` finds the old one aside until the new one is there
            final.rename(_aside(final))
        beside.rename(final)
        _sync(self.folder)
        _write_atomically(self.folder / "LATEST", final.name)
        ownership.remove(_aside(final))
        for old in self.all()[: -self._keep]:
            ownership.remove(old)
        return final

    def all(self) -> list[Path]:
        """Complete folders, oldest first."""
        found = [
            (int(m[2]), p) for p in self.folder.glob("*version-*") if (m := _NAME.fullmatch(p.name))
        ]
        return [
            p
            for _, p in sorted(found)
            if p.name.startswith("version-")
            or not (self.folder / p.name.removeprefix(_ASIDE)).exists()
        ]

    def supersede(self, version: PolicyVersion) -> None:
        """A run goes on from `version`: newer checkpoints, of a history that is no more or broken, are set aside by name."""
        for path in self.all():
            if int(path.name.rpartition("-")[2]) > version:
                number = sum(1 for _ in self.folder.glob(f"superseded-*-{path.name}")) + 1
                path.rename(self.folder / f"superseded-{number}-{path.name}")

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint, and why newer ones were passed over."""
        passed: list[str] = []
        for path in reversed(self.all()):
            try:
                verify(path)
            except CheckpointError as error:
                passed.append(str(error))
            else:
                return path, passed
        return None, passed


def verify(path: Path) -> Manifest:
    """Read the manifest and prove every file. Raises CheckpointError, naming the file."""
    manifest_file = path / "manifest.json"
    if not manifest_file.is_file():
        raise CheckpointError(f"{path}: no manifest.json: not a checkpoint, or not a whole one")
    try:
        manifest = msgspec.json.decode(manifest_file.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{manifest_file}: not readable: {error}") from error
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing")
        if _entry(file) != entry:
            raise CheckpointError(
                f"{file}: not what the manifest says ({entry.bytes} bytes, SHA-256 {entry.sha256[:12]}...)"
            )
    return manifest


def read_ledger(path: Path) -> LedgerSnapshot:
    """Return the ledger's snapshot of a verified checkpoint."""
    data = (path / "ledger.json").read_bytes()
    if b'"slots":' not in data[:_HEAD]:  # older checkpoints call the slots "held"
        data = data[:_HEAD].replace(b',"held":[', b',"slots":[', 1) + data[_HEAD:]
    try:
        snapshot: LedgerSnapshot = codec.from_json(data, LedgerSnapshot)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path / 'ledger.json'}: not readable: {error}") from error
    return snapshot


def _aside(final: Path) -> Path:
    return final.with_name(f"{_ASIDE}{final.name}")


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_atomically(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    _sync(beside)
    beside.replace(path)
    _sync(path.parent)
