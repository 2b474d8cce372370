"""Copies of checkpoints in a store: whole, of this run, and never in the way of the run."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from rich.console import Console

from millrace.config import Config, recipe
from millrace.errors import ConfigError
from millrace.observe.progress import Lines, Progress
from millrace.pipeline.checkpoint import Checkpoints, verify
from millrace.run.folder import open_run_dir, release
from millrace.run.mirror import Mirror, Store, fetch, open_mirror
from tests.e2e import runs
from tests.pipeline.test_checkpoint import Engine, cut
from tests.waiting import HANG_S


class Flaky(LocalFileSystem):
    """A store that refuses what it is told to."""

    protocol = "flaky"
    refuses: str = ""

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        if self.refuses and self.refuses in rpath:
            raise PermissionError(f"no write to {rpath}")
        super().put_file(lpath, rpath, *args, **kwargs)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def _healthy() -> Iterator[None]:
    yield
    Flaky.refuses = ""


def progress() -> tuple[Progress, io.StringIO]:
    told = io.StringIO()
    return Progress(Lines(Console(file=told, width=400)), "test", "test"), told


def config(place: Path, run: Path, *more: str, protocol: str = "flaky") -> Config:
    keys = [f"trainer.mirror={protocol}://{place}", f"trainer.run_dir={run}", *more]
    return recipe.load("quickstart", keys)


def saved(
    place: Path, run: Path, *versions: int, keep: int = 2, refuses: tuple[int, ...] = ()
) -> str:
    """Save versions in one attempt of a run, and wait for each copy. Return the output."""
    done = open_run_dir(
        config(place, run, "trainer.resume=auto", f"trainer.max_ckpt_to_keep={keep}")
    )
    (run / "model").mkdir(exist_ok=True)
    (run / "history.jsonl").touch()
    shown, told = progress()

    async def main() -> None:
        trainer = config(place, run, f"trainer.max_ckpt_to_keep={keep}").trainer
        async with open_mirror(done.store, trainer, run, shown) as mirror:
            assert mirror is not None
            checkpoints = Checkpoints(run, keep=keep, offer=mirror.offer)
            for version in versions:
                Flaky.refuses = "ledger.json" if version in refuses else ""
                await checkpoints.save(cut(version), Engine(version))
                await mirror.finish()
            assert mirror.copied + mirror.refused == len(versions)
        assert not any((run / ".mirror").iterdir())

    try:
        asyncio.run(main())
    finally:
        release(run)
    return told.getvalue()


def files(folder: Path) -> set[Path]:
    return {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}


def versions(place: Path) -> list[int]:
    return Store(f"file://{place}").versions()


def test_a_copy_is_the_checkpoint_and_old_ones_go(tmp_path: Path) -> None:
    place, run = tmp_path / "place", tmp_path / "run"
    assert "alarm" not in saved(place, run, 1, 2, 3)
    assert versions(place) == [2, 3]
    for folder in (place / "checkpoints").glob("version-*"):
        verify(folder)
        mine = run / "checkpoints" / folder.name
        assert files(folder) == files(mine)
    assert (place / "checkpoints" / "LATEST").read_text() == "version-000003"


def test_a_store_that_fails_costs_an_alarm_and_the_next_checkpoint_tries_again(
    tmp_path: Path,
) -> None:
    place, run = tmp_path / "place", tmp_path / "run"
    told = saved(place, run, 1, 2, 3, 4, keep=9, refuses=(2, 3))
    assert told.count("alarm: flaky://") == 1 and "PermissionError: no write to" in told
    assert told.count("alarm over: ") == 1
    assert versions(place) == [1, 4], "half copies are not listed"
    assert not (place / "checkpoints" / "version-000002").exists(), "and the next copy removes them"


def test_another_machine_resumes_from_the_newest_whole_copy(tmp_path: Path) -> None:
    place, run = tmp_path / "place", tmp_path / "run"
    saved(place, run, 3, 4, 5, keep=3)
    (place / "checkpoints" / "version-000005" / "engine" / "weights").write_text("!")
    (place / "checkpoints" / "version-000007").mkdir()
    other = tmp_path / "other"
    opened = open_run_dir(config(place, other, "trainer.resume=auto"))
    release(other)
    assert opened.resume_from == other / "checkpoints" / "version-000004"
    assert not any("from the beginning" in note for note in opened.notes)
    assert any("version 5 of the mirror" in n and "skipped a damaged" in n for n in opened.notes)
    assert (opened.resume_from / "engine" / "weights").read_text() == "4"
    assert (other / "model" / "config.json").exists() == (run / "model" / "config.json").exists()
    saved(place, other, 5, keep=3)
    assert versions(place) == [3, 4, 5] and verify(place / "checkpoints" / "version-000005")


def test_a_resume_takes_the_newer_of_the_folder_and_the_store(tmp_path: Path) -> None:
    place, run, other = tmp_path / "place", tmp_path / "run", tmp_path / "other"
    saved(place, run, 1)
    shutil.copytree(run, other)
    saved(place, run, 2, 3)
    opened = open_run_dir(config(place, other, "trainer.resume=auto"))
    release(other)
    assert opened.resume_from is not None and opened.resume_from.name == "version-000003"
    again = open_run_dir(config(place, run, "trainer.resume=auto"))
    release(run)
    assert again.resume_from == run / "checkpoints" / "version-000003" and not again.notes


def test_copies_of_a_superseded_history_go(tmp_path: Path) -> None:
    place, run = tmp_path / "place", tmp_path / "run"
    saved(place, run, 2, 4, 5, keep=9)
    Checkpoints(run, keep=9).supersede(2)
    store = Store(f"flaky://{place}")
    store.put(run / "checkpoints" / "version-000002", 9)
    assert versions(place) == [2]


def test_the_newest_waits_and_those_between_are_left_out(tmp_path: Path) -> None:
    place, run = tmp_path / "place", tmp_path / "run"
    run.mkdir()

    async def main() -> list[str]:
        begun: list[str] = []
        store = Store(f"flaky://{place}")
        notes: list[str] = []
        mirror = Mirror(store, run, keep=2, deadline_s=HANG_S, note=notes.append)

        def put(folder: Path, keep: int) -> None:
            begun.append(folder.name)
            assert (folder / "file").read_text() == folder.name[-1], "though the run deleted it"

        store.put = put  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(mirror.run())
            for version in (1, 2, 3):
                folder = run / f"version-00000{version}"
                folder.mkdir()
                (folder / "file").write_text(str(version))
                mirror.offer(folder)
                shutil.rmtree(folder)
            await mirror.finish()
            work.cancel()
        assert mirror.figures() == {"mirror/copied": 1, "mirror/refused": 0, "mirror/version": 3}
        assert not notes
        return begun

    assert asyncio.run(main()) == ["copying-version-000003"]


def test_a_copy_that_never_ends_has_a_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        store, notes = Store(f"flaky://{tmp_path / 'place'}"), list[str]()
        mirror = Mirror(store, tmp_path, keep=2, deadline_s=0.05, note=notes.append)
        hangs = asyncio.Event()
        loop = asyncio.get_running_loop()

        def put(folder: Path, keep: int) -> None:
            asyncio.run_coroutine_threadsafe(hangs.wait(), loop).result()

        store.put = put  # type: ignore[method-assign]
        folder = tmp_path / "version-000001"
        folder.mkdir()
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(mirror.run())
            mirror.offer(folder)
            await mirror.finish()
            work.cancel()
        hangs.set()
        assert mirror.refused == 1 and "wait_deadline_s = 0.05" in notes[0]

    asyncio.run(main())


def test_a_place_of_others_is_refused_and_left_alone(tmp_path: Path) -> None:
    place, run, other = tmp_path / "place", tmp_path / "run", tmp_path / "other"
    saved(place, run, 1)
    for keys in (["trainer.resume=never"], ["trainer.resume=auto"]):
        saved_elsewhere = tmp_path / "elsewhere"
        if keys == ["trainer.resume=auto"]:
            saved(tmp_path / "place2", saved_elsewhere, 1)
        with pytest.raises(ConfigError, match="the checkpoints of another run"):
            open_run_dir(config(place, saved_elsewhere, *keys))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years")
    with pytest.raises(ConfigError, match=r"trainer\.mirror = .*not empty, and no run"):
        open_run_dir(config(foreign, other))
    assert [p.name for p in foreign.iterdir()] == ["thesis.txt"] and not other.exists()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("s3://key:hunter2@bucket/a", r"'\*\*\*': it is an address with a password"),
        ("s3://hunter2@bucket/a", r"'s3://...@bucket/a': .* without a user"),
        ("bucket/a", "an address with a protocol.*file:///"),
        ("s4://bucket/a", "cannot be used: .*s4"),
    ],
)
def test_an_address_that_cannot_work_is_refused(tmp_path: Path, address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        open_run_dir(
            recipe.load("quickstart", [f"trainer.mirror={address}", f"trainer.run_dir={tmp_path}"])
        )
    assert "hunter2" not in str(error.value)


def test_a_manifest_cannot_name_files_outside_of_its_folder(tmp_path: Path) -> None:
    place, run = tmp_path / "place", tmp_path / "run"
    saved(place, run, 1)
    path = place / "checkpoints" / "version-000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../../../.bashrc"] = manifest["files"]["ledger.json"]
    path.write_text(json.dumps(manifest))
    other = tmp_path / "other"
    other.mkdir()
    found, notes = fetch(Store(f"file://{place}"), other, -1)
    assert found is None and "outside of the folder" in notes[0]


def test_a_real_run_goes_on_elsewhere(tmp_path: Path) -> None:
    small = [*runs.SMALL, "data.val_files=[]", "trainer.save_freq=2", "report.enable=false"]
    keys = [f"trainer.mirror=file://{tmp_path / 'place'}", "trainer.resume=auto"]
    first = [f"trainer.run_dir={tmp_path / 'a'}", "rollout.total_rollout_steps=32"]
    assert (
        runs.millrace("train", "quickstart", *small, *keys, *first, "--json").json["versions"] == 2
    )
    assert versions(tmp_path / "place")[-1] == 2
    shutil.rmtree(tmp_path / "a")
    second = [f"trainer.run_dir={tmp_path / 'b'}", "rollout.total_rollout_steps=64"]
    done = runs.millrace("train", "quickstart", *small, *keys, *second, "--json")
    assert done.json["versions"] == 4 and "fetched version-000002 from file://" in done.err
    rows = runs.rows(tmp_path / "b")
    assert [row["version"] for row in rows] == [3, 4]
    assert rows[-1]["mirror/refused"] == 0 and versions(tmp_path / "place")[-1] == 4
