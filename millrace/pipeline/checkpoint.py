"""Checkpoints, which are complete or absent.

Each one is written to a temporary folder, fsynced and renamed. It has a manifest with checksums.
LATEST is written last.

RUN/checkpoints/version-000012/
    engine/         the train engine's state (torch.distributed.checkpoint)
    model/          config and tokenizer, so that the checkpoint can be exported alone
    ledger.json     every sample in a slot: prompt, state, finished segments and results
    config.yaml     the run's configuration
    rows.msgpack    the digests of the rows that the run trains on
    picks.msgpack   with data.sampler: the row and the outcome of each admitted prompt
    manifest.json   version, counts, and bytes and SHA-256 of every other file
RUN/checkpoints/LATEST
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from millrace import codec
from millrace.errors import CheckpointError, DiskError
from millrace.persist import ownership
from millrace.pipeline import journal_file
from millrace.ports import TrainEngine
from millrace.process.files import replace_file, sync
from millrace.schedule.ledger import LedgerSnapshot
from millrace.types import PolicyVersion
from millrace.waits.kernel import moved_mb
from millrace.waits.registry import doing, measuring

_FORMER = re.compile(rb'"(?:trajectories|progress)":\[\{"segments":')
"""In ledgers whose trajectories have no threads. Read as today's, they would have no tokens."""
_REPLACED = ".replaced-"
ROWS = "rows.msgpack"
"""The identity of a run's rows, in its folder and in each checkpoint."""
_NAME = re.compile(rf"({re.escape(_REPLACED)})?version-(\d+)")


class FileEntry(msgspec.Struct, frozen=True):
    """The size and the checksum of one file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The counts of a checkpoint, and the files that it must have."""

    format: int
    version: int
    local_steps: int
    admitted: int
    retired: int
    files: dict[str, FileEntry]
    counts: dict[str, float] = {}
    """The counts of the run so far. An older checkpoint has none."""
    continued: int = 0
    """The admitted samples that continue a response. They took no prompt of the stream."""

    @property
    def begun(self) -> int:
        """Return the position of the next prompt in the stream."""
        return self.admitted - self.continued


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        offer: Callable[[Path], None] = lambda folder: None,
        more: Callable[[LedgerSnapshot], dict[str, bytes]] = lambda snapshot: {},
    ) -> None:
        """`offer` gets each complete checkpoint, in a thread. It may be deleted after that.

        `more` returns other files of a checkpoint, by name.
        """
        self.folder = run_dir / "checkpoints"
        self.using = asyncio.Lock()
        """Held by whoever completes a checkpoint, or reads one that must stay."""
        self._run_dir = run_dir
        self._keep = keep
        self._offer = offer
        self._more = more

    async def save(self, snapshot: LedgerSnapshot, engine: TrainEngine) -> Path:
        """Write one checkpoint. A crash at any moment leaves the previous one intact."""
        await self.begin(snapshot, engine, staged=False)
        return await self.finish(snapshot, engine)

    async def begin(self, snapshot: LedgerSnapshot, engine: TrainEngine, *, staged: bool) -> None:
        """Have the engine save its state. `finish` must come before the next `begin`.

        If `staged`, the engine may step as soon as this returns.
        """
        folder = self.folder / f".writing-{snapshot.version:06d}" / "engine"
        with ownership.disk_errors(folder):
            # A crash can leave such folders.
            for stale in [
                *self.folder.glob(".writing-*"),
                *set(self.folder.glob(f"{_REPLACED}*")).difference(self.all()),
            ]:
                ownership.remove(stale)
            folder.mkdir(parents=True)
        await engine.save(str(folder), staged)

    async def finish(
        self, snapshot: LedgerSnapshot, engine: TrainEngine, counts: dict[str, float] | None = None
    ) -> Path:
        """Wait for the save that `begin` started, and complete the checkpoint."""
        await engine.saved()
        async with self.using:
            with (
                ownership.disk_errors(self.folder),
                doing(f"the files of version {snapshot.version}", by="the disk"),
                measuring("disk MB", moved_mb),
            ):
                return await asyncio.to_thread(self._finish, snapshot, counts or {})

    def _finish(self, snapshot: LedgerSnapshot, counts: dict[str, float]) -> Path:
        temporary = self.folder / f".writing-{snapshot.version:06d}"
        final = self.folder / f"version-{snapshot.version:06d}"
        replaced = self.folder / f"{_REPLACED}{final.name}"
        shutil.copytree(
            self._run_dir / "model",
            temporary / "model",
            ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json"),
        )
        shutil.copy(self._run_dir / "config.yaml", temporary / "config.yaml")
        if (self._run_dir / ROWS).is_file():
            shutil.copy(self._run_dir / ROWS, temporary / ROWS)
        if not any(p.is_file() for p in (temporary / "engine").rglob("*")):
            raise CheckpointError(
                f"{temporary / 'engine'}: the train engine wrote nothing here. "
                "Fix: a run folder that all nodes share"
            )
        (temporary / "ledger.json").write_bytes(codec.to_json(snapshot))
        for name, data in self._more(snapshot).items():
            (temporary / name).write_bytes(data)
        files = {
            str(p.relative_to(temporary)): _entry(p)
            for p in sorted(temporary.rglob("*"))
            if p.is_file()
        }
        now = snapshot
        manifest = Manifest(
            1, now.version, now.local_steps, now.admitted, now.retired, files, counts, now.continued
        )
        (temporary / "manifest.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        )
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
        if final.exists():
            # The run saves this version again. `all` lists the old folder until the new one exists.
            final.rename(replaced)
        temporary.rename(final)
        sync(self.folder)
        replace_file(self.folder / "LATEST", final.name, durable=True)
        self._offer(final)
        ownership.remove(replaced)
        kept = self.all()
        for old in kept[: -self._keep]:
            ownership.remove(old)
        oldest = kept[-self._keep :][0]
        journal_file.remove_older(self._run_dir / "journal", int(oldest.name.rpartition("-")[2]))
        return final

    def all(self) -> list[Path]:
        """Return the complete folders, oldest first."""
        folders = [
            (int(m[2]), p) for p in self.folder.glob("*version-*") if (m := _NAME.fullmatch(p.name))
        ]
        return [
            p
            for _, p in sorted(folders)
            if p.name.startswith("version-")
            or not (self.folder / p.name.removeprefix(_REPLACED)).exists()
        ]

    def supersede(self, version: PolicyVersion) -> None:
        """Rename the checkpoints newer than `version`, from which a run resumes.

        They belong to a superseded history, or they are broken. LATEST names the newest of the
        others, or is removed.
        """
        with ownership.disk_errors(self.folder):
            folders = {path: int(path.name.rpartition("-")[2]) for path in self.all()}
            if not (newer := [path for path, number in folders.items() if number > version]):
                return
            if rest := [path for path in folders if path not in newer]:
                replace_file(self.folder / "LATEST", rest[-1].name, durable=True)
            else:
                (self.folder / "LATEST").unlink(missing_ok=True)
            for path in newer:
                number = sum(1 for _ in self.folder.glob(f"superseded-*-{path.name}")) + 1
                path.rename(self.folder / f"superseded-{number}-{path.name}")

    def newest(self) -> tuple[Path | None, list[str]]:
        """Return the newest complete checkpoint, and the errors of newer ones.

        Raises CheckpointError if the disk cannot be read: that says nothing about a checkpoint.
        """
        errors: list[str] = []
        with ownership.disk_errors(self.folder):
            for path in reversed(self.all()):
                try:
                    verify(path)
                except DiskError:
                    raise
                except CheckpointError as error:
                    errors.append(str(error))
                else:
                    return path, errors
        return None, errors


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises CheckpointError if there is none, and DiskError if the disk cannot be read.
    """
    manifest_file = path / "manifest.json"
    with ownership.disk_errors(path):
        if not path.exists():
            raise CheckpointError("no such folder")
        if not manifest_file.is_file():
            raise CheckpointError(
                f"{path}: no manifest.json: not a checkpoint, or an incomplete one"
            )
        data = manifest_file.read_bytes()
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{manifest_file}: not readable: {error}") from error


def verify(path: Path) -> Manifest:
    """Read the manifest and verify every file. Raises CheckpointError, which names the file."""
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing")
        if _entry(file) != entry:
            raise CheckpointError(
                f"{file}: not what the manifest says "
                f"({entry.bytes} bytes, SHA-256 {entry.sha256[:12]}...)"
            )
    return manifest


def read_ledger(path: Path) -> LedgerSnapshot:
    """Return the ledger's snapshot of a verified checkpoint."""
    with ownership.disk_errors(path):
        data = (path / "ledger.json").read_bytes()
    try:
        if _FORMER.search(data):
            raise msgspec.DecodeError("a trajectory has no threads")
        snapshot: LedgerSnapshot = codec.from_json(data, LedgerSnapshot)
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"{path / 'ledger.json'}: not readable: {error}. "
            "Fix: a checkpoint of this millrace, or trainer.resume=never"
        ) from error
    return snapshot


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
