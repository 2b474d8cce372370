"""The identity of a run's rows, by their digests: a checkpoint has it, and a resume compares it.

Digests are of the content of rows, so a file may move, and JSONL may become parquet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from millrace.config import DataConfig
from millrace.data.prompts import PromptStream
from millrace.data.row_store import digest
from millrace.data.sources import Part, Rows
from millrace.errors import CheckpointError, bad_value
from millrace.persist import ownership
from millrace.pipeline.checkpoint import ROWS, read_manifest
from millrace.process.files import replace_file

_WIDTH = 8
_LOOKED_AT = 16
"""Rows of a generated source that its digest has. Its size and parameters are in it too."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Rows that follow each other."""

    source: str
    """The source of the first row."""
    digests: bytes
    """8 bytes for each row of files, or 8 bytes for all rows of a generated source."""
    generated: int = 0
    """The number of generated rows."""

    @property
    def size(self) -> int:
        return self.generated or len(self.digests) // _WIDTH


class Identity(msgspec.Struct, frozen=True):
    """The rows of a run, and the rows of each part of its prompts."""

    train: list[Block]
    val: bytes
    """One digest of all validation rows."""
    kept: str
    """A digest of the rows with prompts that fit, and their number."""
    growth: list[tuple[int, int]]
    """Pairs of a prompt's index, and the number of rows from it on."""
    names: list[str]
    """The data_source of the rows of each source that have none."""

    @property
    def rows(self) -> int:
        return sum(block.size for block in self.train)


def identity_of(stream: PromptStream, val: Rows | None) -> Identity:
    """Return the identity of the rows of a run."""
    return Identity(
        blocks_of(stream.rows),
        digest_of(val),
        kept_digest(stream, len(stream.rows)),
        list(stream.growth or [(0, len(stream))]),
        names_of(stream.rows),
    )


def names_of(rows: Rows) -> list[str]:
    """Return the data_source of the rows of each source that have none, without repeats."""
    return list(dict.fromkeys(part.name for part in rows.parts))


def kept_digest(stream: PromptStream, rows: int) -> str:
    """Return a digest of those of the first `rows` rows that fit, and their number."""
    import numpy

    kept = stream.kept[: bisect_left(stream.kept, rows)]
    if len(kept) and int(kept[-1]) == len(kept) - 1:  # all rows up to there
        return f"{len(kept)}"
    whole = numpy.asarray(kept, "i8").tobytes()
    return f"{len(kept)} {blake2b(whole, digest_size=_WIDTH).hexdigest()}"


def blocks_of(rows: Rows) -> list[Block]:
    """Return the digests of rows. Files that follow each other are one block."""
    blocks: list[Block] = []
    for part in rows.parts:
        if part.stored is None:
            blocks.append(Block(part.source, _generated(part), part.size))
            continue
        digests = part.stored.digests[: part.size].tobytes()
        if blocks and not blocks[-1].generated:
            last = blocks.pop()
            blocks.append(Block(last.source, last.digests + digests))
        else:
            blocks.append(Block(part.source, digests))
    return blocks


def digest_of(rows: Rows | None) -> bytes:
    """Return one digest of all rows."""
    blocks = [] if rows is None else blocks_of(rows)
    whole = b"".join(block.digests + b"%d" % block.generated for block in blocks)
    return blake2b(whole, digest_size=_WIDTH).digest()


def _generated(part: Part) -> bytes:
    rows = b"".join(digest(part.get(i)) for i in range(min(part.size, _LOOKED_AT)))
    return blake2b(rows + f"{part.size} {part.parameters}".encode(), digest_size=_WIDTH).digest()


def difference(before: Sequence[Block], now: Sequence[Block]) -> tuple[int, str]:
    """Return the index of the first row of `now` that differs, and a sentence. (-1, "") if none.

    Rows that were added at the end are no difference.
    """
    at = 0
    for n, then in enumerate(before):
        if n == len(now):
            return at, f"the checkpoint has {then.source} there, and no source follows now"
        new = now[n]
        if bool(then.generated) != bool(new.generated) or (
            then.generated and then.digests != new.digests
        ):
            return at, f"the checkpoint has {then.source} there, and now it is {new.source}"
        last = n == len(before) - 1
        if new.digests != then.digests and not (last and new.digests.startswith(then.digests)):
            row, why = _in_file(then.digests, new.digests)
            return at + row, why
        at += then.size
    return -1, ""


def _in_file(before: bytes, now: bytes) -> tuple[int, str]:
    """Return the first row that differs, and how the others do."""
    import numpy

    then, new = (numpy.frombuffer(digests, "u8") for digests in (before, now))
    shared = min(len(then), len(new))
    differs = numpy.flatnonzero(then[:shared] != new[:shared])
    row = int(differs[0]) if len(differs) else shared
    if len(then) == len(new) and (numpy.sort(then) == numpy.sort(new)).all():
        return row, "the same rows are in another order"
    if len(then) != len(new):
        return row, f"there are {len(new):,} rows, and the checkpoint has {len(then):,}"
    return row, f"{len(differs):,} of {len(new):,} rows differ"


Growth = Sequence[tuple[int, int]]


def write(run: Path, identity: Identity) -> None:
    """Write the identity of a run's rows, which each checkpoint copies."""
    try:
        replace_file(run / ROWS, msgspec.msgpack.encode(identity))
    except OSError as error:
        raise ownership.unwritable(run, error) from None


def read(checkpoint: Path) -> Identity | None:
    """Return the identity of the rows of a checkpoint. An older millrace has written none."""
    path = checkpoint / ROWS
    if not path.is_file():
        return None
    with ownership.disk_errors(checkpoint):
        data = path.read_bytes()
    try:
        return msgspec.msgpack.decode(data, type=Identity)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error


def check(
    data: DataConfig, checkpoint: Path, train: Rows, val: Rows | None
) -> tuple[Growth, list[str]]:
    """Return how many rows each part of the prompts has, and notes.

    0 stands for all rows of now. Raise ConfigError if a row that the checkpoint has is another one
    now, or if rows were added and data.appended_rows does not use them.
    """
    if (before := read(checkpoint)) is None:
        return (), [
            f"{checkpoint} has no digests of its rows, so nobody can compare the rows of "
            "data.train_files with them. Checkpoints from now on have digests"
        ]
    notes = []
    if before.val != digest_of(val):
        notes.append(
            "data.val_files has other rows than at the checkpoint, so validations before and after "
            "it are of different problems"
        )
    if before.names != (names := names_of(train)):
        notes.append(
            f"rows without a data_source are of {', '.join(names)} now, after the names of the "
            f"sources, and of {', '.join(before.names)} in the checkpoint"
        )
    row, why = difference(before.train, blocks_of(train))
    if row >= 0:
        rule = f"row {row + 1:,} of the checkpoint {checkpoint} is missing: {why}"
        if row < len(train):
            rule = f"{train.describe(row)} is not the row that the checkpoint {checkpoint} has there: {why}"
        fix = "the rows of the checkpoint, whatever their file is called, or a new run"
        raise bad_value("data.train_files", data.train_files, rule, fix)
    if not (more := len(train) - before.rows):
        return before.growth, notes
    if data.appended_rows == "refuse":
        rule = (
            f"the checkpoint {checkpoint} lacks {more:,} rows, from {train.describe(before.rows)}"
        )
        fix = "data.appended_rows=use to train on them from the next epoch on, "
        fix += f"data.train_max_samples={before.rows} to leave them out, or a new run"
        raise bad_value("data.train_files", data.train_files, rule, fix)
    begin, count = before.growth[-1]
    begun = read_manifest(checkpoint).begun
    ends = begin + -(-(begun - begin) // count) * count
    kept = [pair for pair in before.growth if pair[0] < ends]
    notes.append(
        f"{more:,} rows were added to data.train_files. Prompts from {ends:,} on have them"
    )
    return [*kept, (ends, 0)], notes


def check_kept(checkpoint: Path, stream: PromptStream) -> None:
    """Raise ConfigError if other rows have prompts that fit than at the checkpoint."""
    before = read(checkpoint)
    if before is None or before.kept == kept_digest(stream, before.rows):
        return
    fit = before.growth[-1][1]
    rule = f"other prompts fit than at the checkpoint {checkpoint}, of which {fit:,} fit"
    fix = "the tokenizer, the chat template and the libraries of that run, or a new run"
    raise bad_value("data.filter_overlong_prompts", stream.filter_overlong, rule, fix)


def training_key(stream: PromptStream) -> str:
    """Return a name of the rows and their order, by which a journal knows its run."""
    key = blake2b(repr([*stream.growth] or [(0, len(stream))]).encode(), digest_size=8)
    key.update(kept_digest(stream, len(stream.rows)).encode())
    for block in blocks_of(stream.rows):
        key.update(block.digests)
    return key.hexdigest()
