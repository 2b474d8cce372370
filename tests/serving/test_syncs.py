"""Syncs into a serving engine on the CPU.

Versions are exact. No KV and no weights are stale, and only proven weights are served. A session of
several turns reads again what the schedule says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from millrace import testing
from millrace.errors import BrokenTransfer, SyncError, WorkerError
from millrace.run.engines import sync_options
from millrace.serving import receiver
from millrace.serving.receiver import EngineReceiver
from millrace.testing import RolloutCase, joined
from millrace.types import SamplingParams, Segment, Stop, tokens_of
from tests.serving.replica import PROMPT, TENSOR, Replica, gap
from tests.sync.fleet import regroup

pytestmark = pytest.mark.xdist_group("engines")


def test_every_sync_changes_what_is_served(replica: Replica, runner: asyncio.Runner) -> None:
    """The weights go from A to B and back to A.

    Log-probs are those of the version's model, although the prompt and the prefix cache stay.
    """
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=5)
    for version, seed in ((10, 1), (11, 2), (12, 1), (13, 3)):
        paused = runner.run(replica.publish(version, seed))
        assert 0 < paused < 10
        for _ in range(2):  # the second request finds the prefix of the first
            segments = runner.run(replica.engine.generate(tokens_of(PROMPT), params, "s"))
            assert [s.version for s in segments] == [version]
            assert gap(replica, seed, PROMPT, segments)[0] < 1e-4
    # The model's own loader did the first load. Later loads repeated the copies that it made,
    # unless each rank copies only its parts.
    copies = runner.run(replica.engine.call_workers("copies_of_a_load"))
    tensors = len(replica.models[1].state_dict()) - 1
    assert copies == ([tensors] if TENSOR == 1 else [0] * TENSOR)


def test_another_run_on_the_same_engine_finds_no_kv_of_the_first(
    replica: Replica, runner: asyncio.Runner
) -> None:
    """The versions of the second run begin at 0 again, with other weights.

    PROMPT is in the prefix cache under version 0.
    """
    for seed in (2, 3):
        runner.run(replica.publish(0, seed))
        segments = runner.run(
            replica.engine.generate(
                tokens_of(PROMPT), SamplingParams(12, seed=5, ignore_eos=True), "again"
            )
        )
        assert max(gap(replica, seed, PROMPT, segments)) < 1e-4


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_swap_under_running_requests_knows_which_version_drew_which_token(
    replica: Replica, runner: asyncio.Runner, kv: str
) -> None:
    async def main() -> list[tuple[Segment, ...]]:
        nonlocal read  # type: ignore[misc]
        await replica.publish(20, 1)
        read -= (await replica.engine.stats()).prefill_tokens
        replica.engine._recompute = kv == "recompute"
        params = [
            SamplingParams(max_tokens=200, ignore_eos=True, seed=i) for i in range(24)
        ]  # 16 run, 8 wait
        tasks = [
            asyncio.create_task(replica.engine.generate(tokens_of(PROMPT[: 20 + i]), p, str(i)))
            for i, p in enumerate(params)
        ]
        await testing.rollouts._drawing(replica.engine, 300, RolloutCase())
        await replica.transfer(21, 2)
        on_time = replica.delay_outputs(0.3)
        await asyncio.sleep(0.1)
        await replica.receiver.activate(21)
        on_time()
        replica.engine._recompute = False
        done = list(await asyncio.gather(*tasks))
        read += (await replica.engine.stats()).prefill_tokens
        return done

    read = 0
    results = runner.run(main())
    prompts = sum(20 + i for i in range(len(results)))
    before = [
        20 + i + len(segments[0].tokens) for i, segments in enumerate(results) if len(segments) > 1
    ]
    assert (
        sum(before) <= read <= prompts + sum(before) if kv == "recompute" else 0 < read <= prompts
    )
    swapped = 0
    for i, segments in enumerate(results):
        assert len(joined(segments)) == 200 and segments[-1].stop is Stop.LENGTH
        assert [s.version for s in segments] in ([20], [20, 21], [21])
        prompt, tokens = PROMPT[: 20 + i], joined(segments)
        by_model = {seed: replica.log_probs(seed, prompt, tokens) for seed in (1, 2)}
        at = 0
        for segment in segments:
            said = torch.tensor(segment.log_probs)
            here = slice(at, at + len(said))
            at += len(said)
            if segment.version == 20:
                assert (said - by_model[1][here]).abs().max() < 1e-4
            elif kv == "recompute" or len(segments) == 1:
                # All tokens are read again, or for the first time, so the new model computes all
                # log-probs. If the cut were off by one, the first would be the old model's.
                assert (said - by_model[2][here]).abs().max() < 1e-4
            else:
                assert (said - by_model[1][here]).abs().max() > 0.1
        swapped += len(segments) > 1
    assert swapped >= 8, f"only {swapped} responses were under way at the swap"


async def test_a_bit_that_flips_after_staging_is_never_served(
    replica: Replica, runner: asyncio.Runner
) -> None:
    await replica.transfer(40, 2)
    await replica.engine.call_workers("flip_staged_bit", "model.layers.1.mlp.down_proj.weight")
    served = replica.engine.version
    # The loaded weights equal the staged ones, but the sums were computed at arrival.
    with pytest.raises(
        SyncError,
        match=r"live weights of version 40 are not the trainer's: model\.layers\.1\.mlp\.down_proj",
    ):
        await replica.receiver.activate(40)
    assert replica.engine.version == served, "a version that is not proven is not called live"
    await replica.publish(41, 2)


async def test_an_engine_that_keeps_its_old_weights_is_found_out(
    replica: Replica, runner: asyncio.Runner
) -> None:
    await replica.publish(50, 1)
    await replica.transfer(51, 3)
    await replica.engine.call_workers("load_nothing")
    with pytest.raises(
        SyncError, match=r"replica 0: live weights of version 51 .* \d+ more tensors differ"
    ):
        await replica.receiver.activate(51)
    await replica.publish(52, 3)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert (
        gap(replica, 3, PROMPT, await replica.engine.generate(tokens_of(PROMPT), params, "s"))[0]
        < 1e-4
    )


def test_a_version_that_was_not_received_is_refused(
    replica: Replica, runner: asyncio.Runner
) -> None:
    with pytest.raises(SyncError, match=r"must serve version 99, but version \w+ is staged"):
        runner.run(replica.receiver.activate(99))


def test_a_transfer_has_the_nccl_settings_of_who_started_the_run(
    replica: Replica, runner: asyncio.Runner
) -> None:
    """Engines add their own settings in their workers, after millrace has started.

    The trainer does not have those settings.
    """
    assert runner.run(replica.engine.call_workers("nccl_settings")) == TENSOR * [
        {"NCCL_IB_HCA": "mlx5"}
    ]


def second_turns(
    replica: Replica, runner: asyncio.Runner, version: int, *, kv: str, interrupt: bool
) -> tuple[list[int], tuple[Segment, ...], tuple[Segment, ...], int]:
    """Swap the weights between two turns of a session.

    Return the context of the second turn, the turn, the same turn of a new session, and the tokens
    that the second turn did not read.
    """
    engine, params = replica.engine, SamplingParams(max_tokens=40, ignore_eos=True, seed=4)

    async def main() -> Any:
        await replica.publish(version, 1)
        first = joined(await engine.generate(tokens_of(PROMPT), params, f"{version}/0"))
        if interrupt:
            await engine.interrupt()
        engine._recompute = kv == "recompute"
        await replica.publish(version + 1, 2)
        engine._recompute = False
        context = [*PROMPT, *first, 5, 6, 7]
        before = (await engine.stats()).reused_tokens
        second = await engine.generate(tokens_of(context), params, f"{version}/0")
        reused = (await engine.stats()).reused_tokens - before
        new = await engine.generate(tokens_of(context), params, f"{version}/1")
        return context, second, new, reused

    return runner.run(main())  # type: ignore[no-any-return]


def test_a_session_keeps_its_kv_over_a_swap_and_says_so(
    replica: Replica, runner: asyncio.Runner
) -> None:
    context, second, new, reused = second_turns(replica, runner, 200, kv="keep", interrupt=False)
    assert reused >= 128, "a block of the prompt was in the cache"
    assert [(s.version, s.kv_version) for s in second] == [(201, 200)]
    assert gap(replica, 2, context, second)[0] > 0.01, "some K and V are of the old weights"
    assert [(s.version, s.kv_version) for s in new] == [(201, None)]
    assert gap(replica, 2, context, new)[0] < 1e-4


@pytest.mark.parametrize(
    ("kv", "interrupt", "version"), [("recompute", False, 210), ("keep", True, 220)]
)
def test_a_session_reads_its_history_again_where_the_schedule_says_so(
    replica: Replica, runner: asyncio.Runner, kv: str, interrupt: bool, version: int
) -> None:
    context, second, new, reused = second_turns(
        replica, runner, version, kv=kv, interrupt=interrupt
    )
    assert reused == 0
    for segments in (second, new):
        assert [(s.version, s.kv_version) for s in segments] == [(version + 1, None)]
        assert gap(replica, 2, context, segments)[0] < 1e-4


def test_only_what_continues_a_context_gets_its_salt() -> None:
    from millrace.serving.requests import Salt, Salts

    salts, newest, old = Salts(), Salt(9, 7), Salt(3, 2)
    salts.remember("1/0", tokens_of([1, 2, 3]), old)
    salts.remember("1/0", tokens_of([1, 2, 3, 4, 5]), Salt(4, 3))
    assert salts.of("1/0", tokens_of([1, 2, 3, 4]), newest) == old
    assert salts.of("1/0", tokens_of([1, 2, 3, 4, 5, 6]), newest) == Salt(4, 3)
    assert salts.of("1/0", tokens_of([1, 2]), newest) == newest, "a validation's next question"
    assert salts.of("1/0", tokens_of([1, 9, 3, 4]), newest) == newest
    assert salts.of("1/1", tokens_of([1, 2, 3, 4]), newest) == newest
    for i in range(Salts.CONTEXTS):
        salts.remember("1/0", tokens_of([7, i]), newest)
    assert salts.of("1/0", tokens_of([1, 2, 3, 4]), newest) == newest, "it was forgotten"
    for i in range(Salts.SESSIONS + 5):
        salts.remember(str(i), tokens_of([i]), old)
    assert len(salts._known) == Salts.SESSIONS
    assert salts.of("0", tokens_of([0, 1]), newest) == newest
    salts.check()
    salts.drop_all(9)
    salts.remember("1/0", tokens_of([1]), newest)
    salts.check()
    salts.remember("1/0", tokens_of([1, 2]), old)
    with pytest.raises(SyncError, match=r"KV of swap 3 is kept, .* none before swap 9"):
        salts.check()


async def test_a_staging_that_never_ends_has_a_deadline(
    replica: Replica, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trainer sends. The error reaches the waiting side and names the missing side."""
    monkeypatch.setattr(replica.receiver, "_timeout_s", 1.5)
    with pytest.raises(
        SyncError, match=r"replica 0: \w+'s workers received no weights within 1\.5 s"
    ):
        await replica.receiver.transfer(60)
    with pytest.raises(SyncError, match="must serve version 60, but version None is staged"):
        await replica.receiver.activate(60)
    await asyncio.to_thread(asyncio.run, replica.sender.transfer(60))  # ends the thread that waits


async def test_a_restarted_replica_joins_and_a_changed_weight_is_found(
    replica: Replica, runner: asyncio.Runner
) -> None:
    """The transfer that waits for the lost replica breaks off. A new end takes its place."""
    name = "model.layers.0.mlp.down_proj.weight"
    waiting = asyncio.ensure_future(replica.receiver.transfer(70))
    await asyncio.sleep(0.3)
    await regroup([replica.sender], {}, 2)
    address = "127.0.0.1", replica.store.port
    where = (replica.store, address, 0, sync_options(replica.config))
    assert await regroup([replica.sender], {0: replica.receiver}, 3) == [None]
    with pytest.raises(BrokenTransfer, match="broke off"):
        await waiting
    replica.receiver = await EngineReceiver.join(replica.engine, *where)
    assert await regroup([replica.sender], {0: replica.receiver}, 4) == [None]
    await replica.publish(70, 2)
    await replica.engine.call_workers("change", name)
    with pytest.raises(SyncError, match=f"version 70 are no longer the trainer's: {name} ch"):
        await replica.transfer(71, 2)


async def test_an_engine_that_stands_still_or_dies_fails_its_requests_and_its_sync(
    replica: Replica, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test comes last, because it leaves no engine to serve."""
    monkeypatch.setattr(replica.receiver, "_stall_s", 1.5)
    monkeypatch.setattr(replica.receiver, "_timeout_s", 8.0)  # the store waits, and nothing else
    monkeypatch.setattr(receiver, "_PROBE_S", 0.5)

    async def still(asked: str, stopped_after_s: float) -> None:
        """Stop the core while it stages a version that nobody sends. No request shows it."""
        *_, core = replica.cores()  # with two ranks, the one that reports nothing
        if not stopped_after_s:
            core.suspend()
        transfer = asyncio.create_task(replica.receiver.transfer(70))
        await asyncio.sleep(stopped_after_s)
        core.suspend()
        with pytest.raises(WorkerError, match=f"stood still: .* answer {asked} within 1.5 s"):
            await asyncio.wait_for(transfer, 30)
        core.resume()

    params = SamplingParams(max_tokens=200, ignore_eos=True)
    await replica.engine.generate(tokens_of(PROMPT), params, "s")
    await still("check_health", 0.5)
    await still("stage_weights", 0.0)
    drawing = asyncio.create_task(replica.engine.generate(tokens_of(PROMPT), params, "s"))
    await testing.rollouts._drawing(replica.engine, 2, RolloutCase())
    *_, core = replica.cores()  # with two ranks, the one that reports nothing
    core.suspend()
    # On a busy machine, the core may have drawn all tokens of the first request before.
    task = asyncio.create_task(replica.engine.generate(tokens_of(PROMPT), params, "t"))
    interrupt = asyncio.create_task(replica.engine.interrupt())
    await asyncio.sleep(0.2)
    core.kill()
    with pytest.raises(WorkerError, match="has died"):
        await asyncio.wait_for(interrupt, 30)
    with pytest.raises(WorkerError, match="has died"):
        await asyncio.wait_for(task, 30)
    await asyncio.wait([drawing])
    with pytest.raises(WorkerError, match="has died"):
        await asyncio.wait_for(replica.receiver.transfer(70), 30)
