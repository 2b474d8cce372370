"""The journal: its files, and what a resume takes from them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import CheckpointError
from millrace.extras.faults.disk import Disk, SimPath, View
from millrace.pipeline import journal, journal_file
from millrace.pipeline.journal_file import (
    FORMAT,
    Batch,
    Finished,
    Header,
    Progress,
    Sealed,
    Step,
    checksum,
)
from millrace.pipeline.replay import JournalState, until
from millrace.schedule.ledger import Ledger, State
from millrace.types import Author, Prompt, Sample, Segment, Thread, Trajectory, tokens_of
from tests.pipeline.journals import HEADER, PROMPT, Said, drawn, ledger_at


def finished(i: int, *versions: int) -> Finished:
    return Finished(i, checksum(PROMPT.tokens), (drawn(*versions),) * 2, None)


def facts(seed: int = 0) -> list[Batch]:
    dice = random.Random(seed)
    many = [
        Batch(
            admitted=[(i, 0)],
            progress=[Progress(i + 1, 5, {1: drawn(0, done=False)})],
            finished=[finished(i, 0, dice.randrange(1, 9))],
            dropped=[(i + 2, "timeout")],
        )
        for i in range(dice.randint(1, 4))
    ]
    return [*many, Batch(steps=[Step(1, [0])], sealed=[Sealed(1, 1, [0])])]


def written(folder: Path, batches: list[Batch]) -> Path:
    path = journal_file.path_of(folder, 1, 0)
    path.unlink(missing_ok=True)
    journal.write(path, HEADER, batches)
    return path


def test_what_is_written_is_read_and_a_cut_or_a_flip_never_adds_to_it(tmp_path: Path) -> None:
    for seed in range(3):
        batches = facts(seed)
        path = written(tmp_path, batches)
        whole = path.read_bytes()
        assert journal_file.read(path) == (HEADER, batches, "")
        dice = random.Random(seed)
        for place in dice.sample(range(1, len(whole)), 60):
            path.write_bytes(whole[:place])
            part = journal_file.read(path)
            assert part.batches == batches[: len(part.batches)]
            assert not part.damage or "were torn by the crash" in part.damage
            flipped = bytearray(whole)
            flipped[place] ^= 1 << dice.randrange(8)
            path.write_bytes(flipped)
            part = journal_file.read(path)
            assert part.batches == batches[: len(part.batches)] and part.damage


def test_a_flipped_byte_in_the_middle_names_the_file_and_the_offset(tmp_path: Path) -> None:
    path = written(tmp_path, facts())
    data = bytearray(path.read_bytes())
    second = data.index(b"MRJ\n", 4)
    data[second + 30] ^= 4
    path.write_bytes(data)
    found = journal_file.read(path)
    assert found.header == HEADER and not found.batches
    rest = len(data) - second
    assert found.damage == f"{path}: damaged at byte {second}. Its last {rest} bytes are not used"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a text that somebody left here", "not a journal of millrace"),
        (b"".join(journal_file.framed(Header(9, 1, 0, "", ""))), "a journal of format 9"),
        (b"".join(journal_file.framed(Batch())), "a journal of format None"),
    ],
)
def test_a_foreign_file_is_refused_with_the_fix(tmp_path: Path, data: bytes, says: str) -> None:
    path = journal_file.path_of(tmp_path, 1, 0)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{path}: {says}.*Fix: remove this file, or resume"):
        journal_file.read(path)


def test_a_file_of_another_name_is_no_file_of_the_journal(tmp_path: Path) -> None:
    for name in ("000001-000020 (copy).log", "1a-2b.log", "000001-2026-11-23.log", "notes"):
        (tmp_path / name).write_text("x")
    own = tmp_path / "000001-1000020.log"
    own.touch()
    os.mkfifo(tmp_path / "000001-000007.log")
    assert journal_file.files(tmp_path) == [own]
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert not journal_file.files(link)


def test_a_resume_reads_the_newest_attempt_and_what_it_did_not_replace() -> None:
    def chain(version: int, *names: str) -> list[str]:
        disk = Disk(random.Random(0))
        folder: Any = SimPath(View(disk), "/journal")
        folder.mkdir()
        for name in names:
            (folder / f"{name}.log").write_bytes(b"")
        return [p.name.removesuffix(".log") for p in journal_file.files_from(folder, version)]

    first, third, other = "000001-000000", "000001-000003", "000002-000003"
    assert chain(0, first, third) == [first, third]
    assert chain(4, first, third) == [third]
    assert chain(2, first, third) == [first, third]
    assert chain(3, first, third, other) == [other], "an attempt replaces what it trained again"
    assert chain(0, first, third, other) == [first, other]
    assert chain(0) == []


# -- what a resume may use


def past_of(*batches: Batch, same: bool = True, ledger: Ledger | None = None) -> JournalState:
    past = JournalState()
    for batch in batches:
        past.add(batch)
    past.drop_unusable(ledger or ledger_at(), same=same)
    return past


LATER = (
    Batch(finished=[finished(1, 0), finished(4, 2), finished(5, 1, 2), finished(6, 3)]),
    Batch(steps=[Step(3, [5, 4])], sealed=[Sealed(3, 3, [5, 4])]),
    Batch(progress=[Progress(7, checksum(PROMPT.tokens), {0: drawn(2, 3, done=False)})]),
)


def test_steps_are_trained_again_and_their_versions_keep_their_tokens() -> None:
    past = past_of(*LATER)
    assert past.plan == [5, 4] and past.valid == 3 and not past.lost
    assert past.finished.keys() == {4, 5, 6}, "sample 1 is trained already"
    ledger = ledger_at()
    ledger.follow(past.plan)
    slot = ledger.start(6)
    known = past.recall(6, slot, ledger.version)
    assert known and known.version == 3 and known.sample
    assert known.sample.trajectories == finished(6, 3).trajectories
    assert known.sample.prompt is slot.prompt and known.sample.admitted_version == 2
    assert past.compare(3, [5, 4]) and past.valid == 3


def test_a_version_with_other_samples_ends_the_use_of_later_tokens() -> None:
    past = past_of(*LATER)
    assert not past.compare(3, [4, 5])
    assert past.valid == 2 and not past.plan and past.finished.keys() == {4, 5}
    assert past.progress == {7: {0: until(drawn(2, 3), 2)}}
    assert past.lost == 2 * 2 + 2, "both trajectories of sample 6, and a segment of sample 7"


def test_a_gap_in_the_steps_ends_the_plan() -> None:
    past = past_of(*LATER[:1], Batch(steps=[Step(4, [4, 5])], sealed=[Sealed(4, 4, [4, 5])]))
    assert not past.plan and past.valid == 2 and past.finished.keys() == {4, 5}


def test_other_settings_leave_the_tokens_of_the_checkpoint_and_older_ones() -> None:
    past = past_of(*LATER, Batch(dropped=[(5, "timeout")]), same=False)
    assert not past.plan and past.valid == 2 and past.finished.keys() == {4}
    assert not past.dropped, "the cause of the drop may be gone"


def test_a_drop_is_not_recalled_once_numbers_have_moved() -> None:
    """Windows continue responses under numbers that a drop moves. See docs/decisions/27-windows.md."""
    past, ledger = past_of(*LATER, Batch(dropped=[(9, "timeout")])), ledger_at()
    slot = ledger.start(4)
    slot.prompt = Prompt(4, tokens_of([9]), "", "test")
    assert past.dropped == {9: "timeout"}
    assert past.recall(4, slot, 2) is None
    assert past.recall(9, slot, 2) is None, "it may be another response"


def test_another_prompt_under_the_same_number_is_drawn_anew_with_one_note(tmp_path: Path) -> None:
    past, ledger, notes = past_of(*LATER), ledger_at(), list[str]()
    kept = journal.Journal(tmp_path, ledger, HEADER, past, save_freq=1, note=notes.append)
    for number, lost in ((4, 4 + 6), (5, 4 + 6 + 8)):  # 6 are of version 3, whose steps are void
        slot = ledger.start(number)
        slot.prompt = Prompt(number, tokens_of([9]), "", "test")
        assert kept.recall(number, slot) is None and past.lost == lost
    assert not past.plan, "a planned sample is missing, so the plan is over"
    assert len(notes) == 1 and "sample 4" in notes[0]
    assert "10 known tokens, its own and those of later versions, are drawn again" in notes[0]


def test_a_result_that_may_not_be_used_whole_is_scored_again() -> None:
    mixed = Finished(4, checksum(PROMPT.tokens), (drawn(2), drawn(2, 9)), None)
    past = past_of(Batch(finished=[mixed]))
    kept = past.progress[4]
    assert kept[0].finished and kept[0].score is None and not kept[1].finished
    assert kept[1].tokens == tokens_of([7, 2]) and past.lost == 2


def test_threads_are_cut_before_the_first_later_token() -> None:
    tool = Segment(tokens_of([5]), Author.ENVIRONMENT)
    first, second = drawn(1).segments[0], drawn(4).segments[0]
    talk = Trajectory(
        (Thread((first, tool, second)), Thread((second,), tokens_of([3]))), ended="done"
    )
    assert until(talk, 4) is talk
    assert until(talk, 3) == Trajectory((Thread((first,)),))


def test_a_checkpoint_removes_the_files_that_no_resume_reads(tmp_path: Path) -> None:
    for version in (0, 2, 4):
        journal.write(journal_file.path_of(tmp_path, 1, version), HEADER, [])
    journal_file.remove_older(tmp_path, 3)
    assert [p.name for p in journal_file.files(tmp_path)] == [
        "000001-000002.log",
        "000001-000004.log",
    ]


def test_a_resume_says_what_it_takes_and_moves_it_to_its_own_file(tmp_path: Path) -> None:
    written(tmp_path, [Batch(admitted=[(i, 2) for i in range(4, 9)]), *LATER])
    path = journal_file.path_of(tmp_path, 1, 0)
    path.write_bytes(path.read_bytes() + b"MRJ\nrest")
    said, ledger = Said(), ledger_at()
    mine = Header(FORMAT, 2, 2, "samples", "training")
    kept = journal.resume(tmp_path, ledger, mine, save_freq=1, note=said)
    assert said == [
        "resumed at version 2 + journal: 3 finished samples used again, 1 continued at 4 tokens, "
        "0 known tokens are drawn again, and all tokens of 1 samples. The "
        f"journal's last 8 bytes were torn by the crash ({path})"
    ]
    own = journal_file.read(journal_file.path_of(tmp_path, 2, 2))
    again = JournalState()
    for batch in own.batches:
        again.add(batch)
    again.drop_unusable(ledger_at(), same=True)
    assert (
        (again.plan, again.finished)
        == (kept.past.plan, kept.past.finished)
        == ([5, 4], kept.past.finished)
    )
    other = Header(FORMAT, 3, 2, "of another run", "training")
    assert not journal.resume(tmp_path, ledger_at(), other, save_freq=1, note=said).past
    assert "of a run with other settings, so its samples are not used" in said[-1]


def test_a_plan_comes_first_and_a_drop_leaves_it() -> None:
    ledger = ledger_at(4, 0)
    ledger.follow([3, 1])
    for i in range(3):
        ledger.start(i)
        ledger.finish(i, Sample(Prompt(i, PROMPT.tokens, "", ""), ()))
    assert not ledger.can_take() and ledger.count(State.READY) == 3
    ledger.drop(3, "timeout")
    assert ledger.takeable() == [1, 0]
    ledger.follow(())
    assert ledger.takeable() == [0, 1]
