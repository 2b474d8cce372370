"""The mirror: a copy of each checkpoint in a store, such as a bucket.

    consumes   whole checkpoints of the run's folder
    waits for  the store, in a thread; no loop of the run waits for it
    produces   the same checkpoints in the store

A store that fails costs an alarm. The next checkpoint tries again. If checkpoints come faster than
the store takes them, the newest one is copied next, and those between are left out.

ADDRESS/.millrace-run                        the id of the run that writes here
ADDRESS/checkpoints/version-000012/...       as in the run's folder; manifest.json is written last
ADDRESS/checkpoints/LATEST

A store has no rename. So a checkpoint without a manifest is incomplete, and nobody reads it.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import shutil
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath

import msgspec

from millrace.config import TrainerConfig
from millrace.errors import CheckpointError, ConfigError, bad_value
from millrace.observe.progress import Progress
from millrace.persist import ownership
from millrace.pipeline.checkpoint import Manifest, read_manifest, verify
from millrace.process.files import replace_file
from millrace.sync.background import abandonable
from millrace.waits.registry import acting, doing, waiting

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


STAGED = ".mirror"
"""The folder of a run with the checkpoint that is copied next. Its files are links."""


class Mirror:
    """The copies of one run."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        keep: int,
        deadline_s: float,
        note: Callable[[str], None],
    ) -> None:
        """`deadline_s` limits each copy."""
        self.copied = self.refused = 0
        """Checkpoints that the store has, and those that it refused."""
        self.version = -1
        """The newest version that the store has from this attempt."""
        self._store, self._staged, self._keep = store, folder / STAGED, keep
        self._deadline_s, self._note = deadline_s, note
        self._loop = asyncio.get_running_loop()
        self._some, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._next: Path | None = None
        self._failing = False
        ownership.remove(self._staged)

    def offer(self, folder: Path) -> None:
        """Take a complete checkpoint, which may be deleted after the return. Any thread calls it.

        Links to its files keep them until the copy is made.
        """
        with self._lock:
            staged = self._staged / folder.name
            ownership.remove(staged)
            try:
                shutil.copytree(folder, staged, copy_function=_link)
            except OSError as error:
                ownership.remove(staged)
                self._loop.call_soon_threadsafe(self._refuse, error)
                return
            older, self._next = self._next, staged
            if older is not None and older != staged:
                ownership.remove(older)
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._idle.clear()
        self._some.set()

    async def run(self) -> None:
        """Copy what is offered, until the run cancels this task."""
        with acting("mirror"):
            while True:
                await self._some.wait()
                self._some.clear()
                await self._copy_next()
                if not self._some.is_set():
                    self._idle.set()

    async def finish(self) -> None:
        """Wait until the last checkpoint is copied or refused."""
        await asyncio.sleep(0)  # An offer of another thread has arrived.
        with waiting("mirror", "the copy of the last checkpoint"):
            await self._idle.wait()

    def figures(self) -> dict[str, float]:
        """Return what the rows have of the copies."""
        found = {"mirror/copied": float(self.copied), "mirror/refused": float(self.refused)}
        return found | ({"mirror/version": float(self.version)} if self.copied else {})

    async def _copy_next(self) -> None:
        with self._lock:
            staged, self._next = self._next, None
            if staged is None:
                return
            taken = staged.rename(staged.with_name(f"copying-{staged.name}"))
        version = int(staged.name.rpartition("-")[2])
        try:
            with doing(f"the copy of version {version}", by="the store"):
                async with asyncio.timeout(self._deadline_s):
                    await abandonable(self._store.put, taken, self._keep)
        except TimeoutError:
            self._refuse(TimeoutError(f"no end after trainer.wait_deadline_s = {self._deadline_s}"))
        except Exception as error:  # noqa: BLE001 - a run does not fail because its mirror does
            self._refuse(error)
        else:
            self.copied, self.version = self.copied + 1, version
            if self._failing:
                self._failing = False
                self._note(f"alarm over: {self._store.address} takes checkpoints again")
        finally:
            ownership.remove(taken)

    def _refuse(self, error: Exception) -> None:
        self.refused += 1
        if not self._failing:
            self._failing = True
            self._note(
                f"alarm: {self._store.address} refuses a checkpoint: {type(error).__name__}: "
                f"{error}. The run goes on, and the next checkpoint is tried again"
            )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


@asynccontextmanager
async def open_mirror(
    store: Store | None, trainer: TrainerConfig, folder: Path, progress: Progress
) -> AsyncIterator[Mirror | None]:
    """Copy checkpoints while the body runs. At its end, wait for the last copy.

    A cancelled body does not wait.
    """
    if store is None:
        yield None
        return
    mirror = Mirror(
        store,
        folder,
        keep=trainer.max_ckpt_to_keep,
        deadline_s=trainer.wait_deadline_s,
        note=progress.note,
    )
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(mirror.run(), name="mirror")
        yield mirror
        progress.phase(f"copying the last checkpoint to {store.address}")
        await mirror.finish()
        work.cancel()
