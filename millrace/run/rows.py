"""The rows that a run trains on, in its folder and its checkpoints, and their check at a resume."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from millrace.config import DataConfig
from millrace.data.identity import Identity, blocks_of, difference, digest_of, kept_digest, names_of
from millrace.data.prompts import PromptStream
from millrace.data.sources import Rows
from millrace.errors import CheckpointError, bad_value
from millrace.persist import ownership
from millrace.pipeline.checkpoint import ROWS, read_manifest
from millrace.process.files import replace_file

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
