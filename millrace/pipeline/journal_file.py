"""The files of the journal: framed records with checksums, which only grow.

RUN/journal/000003-000012.log    the facts of attempt 3, from version 12 on

A record is a head and a msgpack payload. The head has a mark, the size and the CRC-32 of the
payload, and its own CRC-32. The first record of a file is its Header, each other one a Batch. A
crash may tear the end of a file. Damage before intact records is something else, and is named.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from millrace import codec
from millrace.errors import CheckpointError
from millrace.process.files import sync
from millrace.types import PolicyVersion, Prompt, Trajectory

FORMAT = 1
_HEAD = struct.Struct("<4sIII")
_MARK = b"MRJ\n"
_PROBE = 2**16
"""The bytes of a file that only tries a disk."""
_NAME = re.compile(r"[0-9]{6,}-[0-9]{6,}\.log")


class Header(msgspec.Struct, frozen=True):
    """Which run and which attempt wrote a file."""

    format: int
    attempt: int
    version: PolicyVersion
    """The live version at the start of the file."""
    samples: str
    """A digest of the settings that shape samples. Another run's differs."""
    training: str
    """A digest of the settings that shape the weights of later versions."""


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """A finished sample, without its prompt: that is a pure function of the sample's id."""

    sample_id: int
    prompt: int
    """The CRC-32 of the prompt's tokens."""
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None


class Progress(msgspec.Struct, array_like=True, frozen=True):
    """The trajectories of a running sample that changed, by their place."""

    sample_id: int
    prompt: int
    trajectories: dict[int, Trajectory]


class Step(msgspec.Struct, array_like=True, frozen=True):
    """The samples of one local step, in the order of training."""

    number: int
    """The count of local steps after this one."""
    ids: list[int]
    lr_scale: float = 1.0
    prompts: dict[int, Prompt] = {}
    """The prompts that the stream does not have at the number of their sample."""


class Sealed(msgspec.Struct, array_like=True, frozen=True):
    """The samples that make a version, in the order of training."""

    version: PolicyVersion
    steps: int
    """The count of local steps in its weights."""
    ids: list[int]


class Batch(msgspec.Struct, array_like=True):
    """The moves of samples in a moment. An admission has the live version."""

    admitted: list[tuple[int, PolicyVersion]] = []
    progress: list[Progress] = []
    finished: list[Finished] = []
    dropped: list[tuple[int, str]] = []
    steps: list[Step] = []
    sealed: list[Sealed] = []


class Part(NamedTuple):
    """The readable part of a journal file."""

    header: Header | None
    """None if not even this record is whole."""
    batches: list[Batch]
    damage: str
    """What is wrong with the rest of the file, if anything."""


def checksum(tokens: object) -> int:
    return zlib.crc32(tokens)  # type: ignore[arg-type]


def framed(record: Header | Batch) -> tuple[bytes, bytes]:
    """Return the head and the payload of one record."""
    payload = codec.pack(record)
    start = _MARK, len(payload), zlib.crc32(payload)
    head = zlib.crc32(_HEAD.pack(*start, 0))
    return _HEAD.pack(*start, head), payload


def path_of(folder: Path, attempt: int, version: PolicyVersion) -> Path:
    return folder / f"{attempt:06d}-{version:06d}.log"


def numbers_of(path: Path) -> tuple[int, int]:
    """Return the attempt and the version of a file's name."""
    attempt, _, version = path.name.partition(".")[0].partition("-")
    return int(attempt), int(version)


def files(folder: Path) -> list[Path]:
    """Return the files of a journal, oldest first. Other files of the folder are not touched."""
    found = folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ()
    return sorted((p for p in found if _NAME.fullmatch(p.name) and p.is_file()), key=numbers_of)


def files_from(folder: Path, version: PolicyVersion) -> list[Path]:
    """Return the files that have the facts after `version`, in order.

    An attempt replaces those parts of earlier ones that begin where it began, or later.
    """
    chain: list[Path] = []
    for path in files(folder):
        first = numbers_of(path)[1]
        if not chain or numbers_of(chain[-1])[0] != numbers_of(path)[0]:
            chain = [p for p in chain if numbers_of(p)[1] < first]
        chain.append(path)
    start = sum(numbers_of(p)[1] <= version for p in chain)
    return chain[max(0, start - 1) :]


def remove(folder: Path, version: PolicyVersion, *, before: int) -> None:
    """Remove the files of attempts before `before` that begin at `version` or later."""
    for path in files(folder):
        attempt, first = numbers_of(path)
        if attempt < before and first >= version:
            path.unlink()


def remove_older(folder: Path, version: PolicyVersion) -> None:
    """Remove the files that a resume from `version` or a later one does not read."""
    needed = files_from(folder, version)
    for path in files(folder):
        if path not in needed:
            path.unlink()


def append(path: Path, records: Iterable[Header | Batch]) -> int:
    """Append to a file, and sync it. A new file's name is durable too. Return the bytes."""
    new, size = not path.is_file(), 0
    with path.open("ab") as file:
        for record in records:
            size += sum(map(file.write, framed(record)))
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync(path.parent)
    return size


def takes(folder: Path) -> bool:
    """Whether the disk takes a file now."""
    probe = folder / ".probe"
    try:
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def read(path: Path) -> Part:
    """Return the whole records of a file, up to the first that is not.

    Raises CheckpointError if the file is no journal, or has another format.
    """
    data, offset = path.read_bytes(), 0
    header: Header | None = None
    batches: list[Batch] = []
    while offset < len(data):
        if (payload := _payload(data, offset)) is None:
            return Part(header, batches, _damage(path, data, offset))
        try:
            if header is None:
                header = _header(path, payload)
            else:
                batches.append(codec.decoder(Batch).decode(payload))
            offset += _HEAD.size + len(payload)
        except (msgspec.DecodeError, ValueError) as error:
            raise CheckpointError(f"{path}, byte {offset}: not readable: {error}. {FIX}") from error
    return Part(header, batches, "")


FIX = "Fix: remove this file, or resume without the journal with trainer.journal=false"


def _header(path: Path, payload: memoryview) -> Header:
    found = msgspec.msgpack.decode(payload)
    number = found.get("format") if isinstance(found, dict) else None
    if number != FORMAT:
        rule = f"this millrace reads format {FORMAT}"
        raise CheckpointError(f"{path}: a journal of format {number}, and {rule}. {FIX}")
    return msgspec.convert(found, Header)


def _payload(data: bytes, offset: int) -> memoryview | None:
    """Return the payload of the record at `offset`, or None if there is no whole one."""
    if offset + _HEAD.size > len(data):
        return None
    mark, size, crc, own = _HEAD.unpack_from(data, offset)
    if mark != _MARK or own != zlib.crc32(_HEAD.pack(mark, size, crc, 0)):
        return None
    start = offset + _HEAD.size
    payload = memoryview(data)[start : start + size]
    return payload if len(payload) == size and zlib.crc32(payload) == crc else None


def _damage(path: Path, data: bytes, offset: int) -> str:
    """Say what is wrong at `offset`. Raises CheckpointError if the file is no journal."""
    rest, after = len(data) - offset, data.find(_MARK, offset + 1)
    while after >= 0:
        if _payload(data, after) is not None:
            return f"{path}: damaged at byte {offset}. Its last {rest} bytes are not used"
        after = data.find(_MARK, after + 1)
    if not offset and not _MARK.startswith(data[:4]) and data.strip(b"\0"):
        raise CheckpointError(f"{path}: not a journal of millrace. {FIX}")
    return f"the journal's last {rest} bytes were torn by the crash ({path})"
