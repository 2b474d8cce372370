"""Checkpoints are whole or absent, whatever happens during a write or to the files afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millrace import codec
from millrace.errors import CheckpointError
from millrace.pipeline import checkpoint
from millrace.pipeline.checkpoint import Checkpoints, read_ledger, verify
from millrace.ports import TrainEngine
from millrace.schedule.ledger import Ledger, LedgerSnapshot, Slot, State
from millrace.schedule.schedule import Schedule
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimTrainEngine
from millrace.types import Prompt, Sample, Score, Segment, Stop, Trajectory, floats_of, tokens_of


class Killed(BaseException):
    """A crash, as the code that it hits sees it."""


class Engine(SimTrainEngine):
    """A train engine whose state is one number."""

    def __init__(self, state: int = 0) -> None:
        super().__init__(CostModel())
        self.state = state
        self._staged: tuple[str, int] | None = None

    async def save(self, folder: str, staged: bool = False) -> None:
        self._staged = (folder, self.state)
        if not staged:
            await self.saved()

    async def saved(self) -> None:
        if self._staged is not None:
            (folder, state), self._staged = self._staged, None
            (Path(folder) / "weights").write_text(str(state))


def slots() -> list[tuple[int, Slot]]:
    done = Trajectory.of(
        (Segment(tokens_of([1, 2]), version=3, log_probs=floats_of([-0.1, -2.5]), stop=Stop.EOS),),
        Score(0.5, {"a": 1.0}),
    )
    part = Trajectory.of(
        (Segment(tokens_of([5]), version=2, log_probs=floats_of([-0.25]), stop=Stop.INTERRUPTED),)
    )
    prompt = Prompt(
        8, tokens_of([3, 4]), "sort ☃", "task", ["4", 3], {"k": {"deep": 1}}, {"column": 2.5}
    )
    return [
        (8, Slot(prompt, 3, State.READY, (), Sample(prompt, (done, done), 3))),
        (11, Slot(replace(prompt, index=11), 2, State.WAITING, (part, Trajectory()))),
    ]


def cut(version: int) -> LedgerSnapshot:
    return LedgerSnapshot(version, 2 * version, 12, 9, {"timeout": 1}, slots())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("large")
    (tmp_path / "config.yaml").write_text("name: test\n")
    return tmp_path


def save(run_dir: Path, version: int, *, keep: int = 2, engine: TrainEngine | None = None) -> Path:
    return asyncio.run(
        Checkpoints(run_dir, keep=keep).save(cut(version), engine or Engine(version))
    )


def save_beside(run_dir: Path, version: int, *, keep: int = 2, engine: Engine) -> Path:
    """Save while the engine continues: its state changes before anything is written."""

    async def main() -> Path:
        checkpoints = Checkpoints(run_dir, keep=keep)
        await checkpoints.begin(cut(version), engine, staged=True)
        engine.state += 1000
        assert not list(checkpoints.folder.glob(".writing-*/engine/*")), "nothing is written yet"
        return await checkpoints.finish(cut(version), engine)

    return asyncio.run(main())


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    return Checkpoints(run_dir, keep=2).newest()


def test_a_checkpoint_holds_the_ledger_the_engine_the_config_and_the_model_without_its_weights(
    run_dir: Path,
) -> None:
    path = save(run_dir, 7)
    manifest = verify(path)
    names = ("engine/weights", "ledger.json", "config.yaml", "model/config.json")
    assert set(manifest.files) == set(names)
    counts = (manifest.version, manifest.local_steps, manifest.admitted, manifest.retired)
    assert counts == (7, 14, 12, 9)
    assert read_ledger(path) == cut(7), "every held sample, with its tokens, log-probs and scores"
    restored = Ledger.restore(
        Schedule(ppo_mini_batch_size=4, staleness_threshold=1), read_ledger(path)
    )
    restored.check()
    assert restored.snapshot() == cut(7)
    assert (
        newest(run_dir) == (path, [])
        and (run_dir / "checkpoints" / "LATEST").read_text() == path.name
    )


def fails_at(nth: int, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Make the n-th call of owner.name crash before it does anything."""
    real: Callable[..., object] = getattr(owner, name)
    calls = 0

    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Killed
        return real(*args, **kwargs)

    patch.setattr(owner, name, wrapped)


STAGES: list[tuple[object, str, int]] = [
    (Engine, "save", 1),
    (Engine, "saved", 1),
    (shutil, "copytree", 1),
    (shutil, "copy", 1),
    (checkpoint.codec, "to_json", 1),
    (checkpoint, "_entry", 2),
    (checkpoint, "sync", 1),
    (checkpoint, "sync", 5),
    (Path, "rename", 1),
    (Path, "rename", 2),
    (checkpoint, "replace_file", 1),
    (Path, "replace", 1),
    (shutil, "rmtree", 1),
]


@pytest.mark.parametrize(
    ("owner", "name", "nth"), STAGES, ids=[f"{name}-{nth}" for _, name, nth in STAGES]
)
@pytest.mark.parametrize("again", [False, True], ids=["next version", "same version"])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("save_", [save, save_beside])
def test_a_crash_at_any_stage_leaves_a_whole_checkpoint_and_the_next_save_works(
    run_dir: Path,
    owner: object,
    name: str,
    nth: int,
    again: bool,
    keep: int,
    save_: Callable[..., Path],
) -> None:
    before = save(run_dir, 3, keep=keep)
    version = 3 if again else 4
    with pytest.MonkeyPatch.context() as patch:
        fails_at(nth, patch, owner, name)
        try:
            save_(run_dir, version, keep=keep, engine=Engine(99))
            crashed = False
        except Killed:
            crashed = True
    assert crashed or (name, nth) == ("rename", 2) or name == "rmtree", (
        "the stage should have been reached"
    )
    path, passed = newest(run_dir)
    assert path is not None and not passed
    state = (path / "engine" / "weights").read_text()
    assert state in ("3", "99") and read_ledger(path) == cut(verify(path).version)
    if name in ("save", "saved", "sync", "_entry"):
        assert state == "3" and (path == before), "it was not yet written"
    final = save(run_dir, 5, keep=keep)
    assert newest(run_dir) == (final, [])
    left = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert len([n for n in left if "version" in n]) <= keep and not any(
        n.startswith(".writing") for n in left
    )


def shaped() -> Sample:
    prompt, sample = slots()[0][1].prompt, slots()[0][1].sample
    assert sample is not None
    (done, _) = sample.trajectories
    return Sample(
        prompt,
        (replace(done, score=Score(0.25, {"overlong_reward": -0.25}, 0.5)),),
        3,
        replace(done, score=Score(1.0)),
    )


@pytest.mark.parametrize(
    ("now", "before"),
    [(b'"slots":', b'"held":'), (b'"threads":[{"segments":', b'"segments":[{"x":')],
)
def test_a_ledger_of_an_unreleased_format_is_refused(
    tmp_path: Path, now: bytes, before: bytes
) -> None:
    whole = codec.to_json(replace(cut(5), slots=[(12, Slot(shaped().prompt, 3, sample=shaped()))]))
    assert now in whole
    (tmp_path / "ledger.json").write_bytes(whole.replace(now, before))
    with pytest.raises(CheckpointError, match=r"ledger\.json: not readable: .* Fix: "):
        read_ledger(tmp_path)


def test_a_shaped_score_and_a_greedy_baseline_survive_as_json_and_msgpack() -> None:
    cut_ = LedgerSnapshot(
        1, 2, 12, 9, {}, [(8, Slot(shaped().prompt, 3, State.READY, (), shaped()))]
    )
    assert codec.from_json(codec.to_json(cut_), LedgerSnapshot) == cut_
    assert codec.decoder(Sample).decode(codec.pack(shaped())) == shaped()


def test_samples_saved_before_shaping_and_baselines_were_known_are_read_without_them() -> None:
    def older(value: object) -> object:
        if isinstance(value, dict):
            return {k: older(v) for k, v in value.items() if k not in ("raw", "greedy")}
        return [older(v) for v in value] if isinstance(value, list) else value

    old = json.dumps(older(json.loads(codec.to_json(shaped()))))
    sample = codec.from_json(old.encode(), Sample)
    assert sample.greedy is None and sample.trajectories[0].score == Score(
        0.25, {"overlong_reward": -0.25}
    )
    assert sample.trajectories[0].tokens == shaped().trajectories[0].tokens


def corrupt(path: Path) -> None:
    data = bytearray((path / "engine" / "weights").read_bytes())
    data[0] ^= 1
    (path / "engine" / "weights").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda path: os.truncate(path / "ledger.json", 20),
            r"version-000002/ledger\.json: not what the manifest says \(\d+ bytes, SHA-256 \w{12}",
        ),
        (corrupt, r"version-000002/engine/weights: not what the manifest says \(1 bytes"),
        (lambda path: (path / "config.yaml").unlink(), r"version-000002/config\.yaml: missing"),
        (lambda path: (path / "manifest.json").unlink(), r"version-000002: no manifest\.json"),
        (
            lambda path: (path / "manifest.json").write_text('{"format": 1, "version"'),
            r"version-000002/manifest\.json: not readable",
        ),
    ],
    ids=["truncated", "flipped", "lost", "no manifest", "bad manifest"],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_reason_that_names_the_file(
    run_dir: Path, damage: Callable[[Path], object], reason: str
) -> None:
    whole = save(run_dir, 1)
    damaged = save(run_dir, 2)
    damage(damaged)
    path, passed = newest(run_dir)
    assert path == whole
    with pytest.raises(CheckpointError, match=reason) as caught:
        verify(damaged)
    assert passed == [str(caught.value)]


def test_a_run_without_a_whole_checkpoint_has_none(run_dir: Path) -> None:
    assert newest(run_dir) == (None, [])
    corrupt(save(run_dir, 1))
    path, passed = newest(run_dir)
    assert path is None and len(passed) == 1


def test_the_newest_are_kept_also_past_a_million_versions(run_dir: Path) -> None:
    for version in (2, 999_998, 999_999, 1_000_000, 1_000_001):
        save(run_dir, version)
    assert [int(p.name.removeprefix("version-")) for p in Checkpoints(run_dir, keep=2).all()] == [
        1_000_000,
        1_000_001,
    ]
    assert newest(run_dir)[0] == run_dir / "checkpoints" / "version-1000001"


def test_a_version_saved_again_is_the_later_one_and_leaves_nothing_aside(run_dir: Path) -> None:
    save(run_dir, 4)
    path = save(run_dir, 4, engine=Engine(44))
    assert (path / "engine" / "weights").read_text() == "44" and newest(run_dir) == (path, [])
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {"version-000004", "LATEST"}


def test_going_on_from_an_older_checkpoint_sets_aside_those_of_the_history_that_is_no_more(
    run_dir: Path,
) -> None:
    """Broken newer ones too: with keep=1 they would displace the next checkpoint of the run."""
    older = save(run_dir, 2, keep=3)
    corrupt(save(run_dir, 4, keep=3))
    save(run_dir, 5, keep=3)
    checkpoints = Checkpoints(run_dir, keep=1)
    checkpoints.supersede(2)
    assert checkpoints.all() == [older]
    aside = {p.name for p in checkpoints.folder.iterdir() if p.name.startswith("superseded")}
    assert aside == {"superseded-1-version-000004", "superseded-1-version-000005"}
    assert (checkpoints.folder / "LATEST").read_text() == older.name
    saved = save(run_dir, 3, keep=1)
    assert newest(run_dir) == (saved, [])
    checkpoints.supersede(0)
    assert not checkpoints.all() and not (checkpoints.folder / "LATEST").exists()


def test_a_checkpoint_survives_being_copied_elsewhere(run_dir: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(save(run_dir, 1), copied)
    assert verify(copied).version == 1


class Slow(SimTrainEngine):
    """A train engine that never finishes saving."""

    def __init__(self) -> None:
        super().__init__(CostModel())

    async def save(self, folder: str, staged: bool = False) -> None:
        (Path(folder) / "half").write_text("half")
        if not staged:
            await self.saved()

    async def saved(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("staged", [False, True])
async def test_a_save_that_is_cancelled_leaves_the_previous_one(
    run_dir: Path, staged: bool
) -> None:
    before = await Checkpoints(run_dir, keep=2).save(cut(1), Engine(1))
    checkpoints, slow = Checkpoints(run_dir, keep=1), Slow()
    if staged:
        await checkpoints.begin(cut(2), slow, staged=True)
        assert newest(run_dir) == (before, [])
    task = asyncio.create_task(
        checkpoints.finish(cut(2), slow) if staged else checkpoints.save(cut(2), slow)
    )
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert newest(run_dir) == (before, [])
