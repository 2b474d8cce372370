"""The place of a run in a store, such as a bucket: its owner and its checkpoints.

ADDRESS/.millrace-run                        the id of the run that writes here
ADDRESS/checkpoints/version-000012/...       as in the run's folder; manifest.json is written last
ADDRESS/checkpoints/LATEST

A store has no rename. So a checkpoint without a manifest is incomplete, and nobody reads it.
"""

from __future__ import annotations

import posixpath
import re
import uuid
from pathlib import Path, PurePosixPath

import msgspec

from millrace.config import TrainerConfig
from millrace.errors import CheckpointError, ConfigError, bad_value
from millrace.persist import ownership
from millrace.pipeline.checkpoint import Manifest, read_manifest, verify
from millrace.process.files import replace_file

KEY = "trainer.mirror"
ID = ".mirror-id"
"""The file of a run's folder with the id of the run."""
_NAME = re.compile(r"version-(\d{6,})")
_PACKAGES = {"s3": "millrace[s3]", "s3a": "millrace[s3]", "gs": "gcsfs", "gcs": "gcsfs"}


class Store:
    """A place at an address of fsspec. Its calls block, and raise whatever its client raises."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError if no client can be made for the address."""
        import fsspec

        self.address = address
        protocol = address.partition("://")[0]
        try:
            self._fs, self._root = fsspec.url_to_fs(address, skip_instance_cache=True)
        except ImportError as error:
            fix = f"pip install '{_PACKAGES[protocol]}'" if protocol in _PACKAGES else str(error)
            raise bad_value(KEY, address, "needs a package that is missing", fix) from None
        except Exception as error:  # noqa: BLE001 - a client raises what it wants
            fix = "an address of fsspec, such as s3://bucket/runs/mine"
            raise bad_value(KEY, address, f"cannot be used: {error}", fix) from None
        self._folder = posixpath.join(self._root, "checkpoints")

    # -- the owner

    def owner(self) -> str:
        """Return the id of the run that writes here, or nothing."""
        marker = posixpath.join(self._root, ownership.MARKER)
        self._fs.invalidate_cache()
        return self._fs.cat_file(marker).decode().strip() if self._fs.exists(marker) else ""

    def foreign(self) -> bool:
        """Whether there are files, and no run of millrace made them."""
        return not self.owner() and self._fs.exists(self._root) and bool(self._fs.ls(self._root))

    def claim(self, folder: Path) -> None:
        """Mark the place and the run's folder with the same id."""
        run = self.owner() or _id_of(folder) or uuid.uuid4().hex
        self._write(posixpath.join(self._root, ownership.MARKER), f"{run}\n".encode())
        replace_file(folder / ID, f"{run}\n")

    # -- checkpoints

    def versions(self) -> list[int]:
        """Return the versions of the complete checkpoints, oldest first."""
        return [v for v in self._all() if self._fs.exists(f"{self._at(v)}/manifest.json")]

    def put(self, folder: Path, keep: int) -> None:
        """Copy a checkpoint. Then remove all but the newest `keep` up to its version.

        Newer ones belong to a superseded history. They go too.
        """
        version, manifest = int(folder.name.rpartition("-")[2]), read_manifest(folder)
        self._remove(version)
        for name in sorted(manifest.files):
            self._copy(folder / name, f"{self._at(version)}/{name}", manifest.files[name].bytes)
        last = folder / "manifest.json"
        self._copy(last, f"{self._at(version)}/manifest.json", last.stat().st_size)
        self._write(posixpath.join(self._folder, "LATEST"), f"version-{version:06d}".encode())
        kept = [v for v in self.versions() if v <= version][-keep:]
        for other in self._all():
            if other not in kept:
                self._remove(other)

    def get(self, version: int, folder: Path) -> Path:
        """Copy a checkpoint into `folder`, and verify it. Raises CheckpointError."""
        source, final = self._at(version), folder / f"version-{version:06d}"
        temporary = folder / f".writing-{version:06d}"
        ownership.remove(temporary)
        data = self._fs.cat_file(f"{source}/manifest.json")
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{source}/manifest.json: not readable: {error}") from error
        for name in manifest.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\\" in name:
                raise CheckpointError(f"{source}/manifest.json: {name!r} is outside of the folder")
        for name in manifest.files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            if not self._fs.exists(f"{source}/{name}"):
                raise CheckpointError(f"{source}/{name}: missing")
            self._fs.get_file(f"{source}/{name}", str(temporary / name))
        (temporary / "manifest.json").write_bytes(data)
        verify(temporary)
        if manifest.version != version:
            raise CheckpointError(f"{source}/manifest.json: version {manifest.version}")
        temporary.rename(final)
        return final

    def _at(self, version: int) -> str:
        return posixpath.join(self._folder, f"version-{version:06d}")

    def _all(self) -> list[int]:
        """Return the versions of all checkpoints, complete or not."""
        self._fs.invalidate_cache()
        if not self._fs.exists(self._folder):
            return []
        names = (posixpath.basename(p.rstrip("/")) for p in self._fs.ls(self._folder, detail=False))
        return sorted(int(m[1]) for name in names if (m := _NAME.fullmatch(name)))

    def _remove(self, version: int) -> None:
        """Remove a checkpoint, its manifest first."""
        folder = self._at(version)
        if self._fs.exists(f"{folder}/manifest.json"):
            self._fs.rm_file(f"{folder}/manifest.json")
        self._fs.invalidate_cache()
        if self._fs.exists(folder):
            self._fs.rm(folder, recursive=True)

    def _copy(self, source: Path, target: str, size: int) -> None:
        self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
        self._fs.put_file(str(source), target)
        self._fs.invalidate_cache()
        if (there := self._fs.size(target)) != size:
            raise CheckpointError(f"{target}: has {there} bytes of {size}")

    def _write(self, target: str, data: bytes) -> None:
        self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
        self._fs.pipe_file(target, data)


def open_store(
    trainer: TrainerConfig, folder: Path | None, checkpoint: Path | None
) -> Store | None:
    """Return the place of trainer.mirror, or None if the run has none. Writes nothing.

    `folder` is the run's folder if it is known, and `checkpoint` the one it resumes from. Raises
    ConfigError if the place cannot be read, or belongs to another run.
    """
    if not (address := trainer.mirror):
        return None
    store = Store(address)
    try:
        owner, foreign = store.owner(), store.foreign()
    except Exception as error:
        raise unusable(address, error) from error
    if foreign:
        rule = "the place is not empty, and no run of millrace made it"
        raise bad_value(KEY, address, rule, "a new or an empty place")
    mine = _id_of(folder)
    fresh = trainer.resume == "auto" and not mine and checkpoint is None
    if owner and owner != mine and not fresh:
        raise bad_value(
            KEY,
            address,
            "the place has the checkpoints of another run",
            "another address, or trainer.resume=auto with a new trainer.run_dir to resume that run",
        )
    return store


def unusable(address: str, error: Exception) -> ConfigError:
    """Return the error for a place that cannot be read or written."""
    fix = "an address that this machine can read and write, with its keys in the environment"
    return bad_value(KEY, address, f"cannot be used: {type(error).__name__}: {error}", fix)


def fetch(store: Store, folder: Path, after: int) -> tuple[Path | None, list[str]]:
    """Copy the newest whole checkpoint after a version into a run's folder, if there is one.

    Return it, and notes on damaged ones. Raises ConfigError if the place cannot be read.
    """
    notes: list[str] = []
    target = folder / "checkpoints"
    try:
        for version in reversed(store.versions()):
            if version <= after:
                break
            target.mkdir(exist_ok=True)
            try:
                found = store.get(version, target)
            except CheckpointError as error:
                notes.append(
                    f"skipped a damaged checkpoint: version {version} of the mirror: {error}"
                )
            else:
                notes.append(f"fetched {found.name} from {store.address}")
                return found, notes
    except Exception as error:
        raise unusable(store.address, error) from error
    return None, notes


def _id_of(folder: Path | None) -> str:
    path = folder / ID if folder is not None else None
    return path.read_text().strip() if path is not None and path.is_file() else ""
