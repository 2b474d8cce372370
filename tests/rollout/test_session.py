"""The session of an episode: seeds, limits, interruptions, dead turns, and threads of its tree."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import pytest

from millrace.errors import EpisodeError, LimitReached
from millrace.rollout.session import Limits, Session
from millrace.types import (
    Author,
    Ending,
    Prompt,
    SamplingParams,
    Segment,
    Stop,
    Thread,
    Tokens,
    Trajectory,
    Turn,
    tokens_of,
)
from tests.rollout.helpers import said
from tests.rollout.streams import Stream

PROMPT = Prompt(3, tokens_of([7, 8]), "p", "d")
T = tokens_of


def session(stream: Stream, limits: Limits | None = None, room: int = 500, **more: Any) -> Session:
    params = SamplingParams(room, seed=11)
    return Session(stream, PROMPT, params, "3/0", limits or Limits(), **more)


def run(work: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await work

    return asyncio.run(main())


async def three_turns(s: Session) -> Trajectory:
    first = await s.draw(PROMPT.tokens)
    second = await s.draw(T([90, 91]), after=first.number)
    await s.draw(T([92]), after=second.number)
    return s.trajectory(Ending())


def plain(trajectory: Trajectory) -> list[list[tuple[str, list[int]]]]:
    """Return the threads as runs of tokens by author, whatever the versions are."""
    threads = []
    for thread in trajectory.threads:
        runs: list[tuple[str, list[int]]] = []
        for s in thread.segments:
            if runs and runs[-1][0] == s.author:
                runs[-1][1].extend(s.tokens)
            else:
                runs.append((str(s.author), s.tokens.tolist()))
        threads.append(runs)
    return threads


def test_an_interruption_after_every_token_changes_nothing_but_versions() -> None:
    calm = run(three_turns(session(Stream())))
    assert calm.num_policy_tokens > 6 and set(calm.versions) == {0}
    for at in range(1, calm.num_policy_tokens + 1):
        cut = Stream(cuts=lambda drawn, at=at: drawn == at)  # type: ignore[misc]
        assert plain(run(three_turns(session(cut)))) == plain(calm)
    always = Stream(cuts=lambda drawn: True)
    broken = run(three_turns(session(always)))
    assert plain(broken) == plain(calm)
    assert list(broken.versions) == sorted(broken.versions) and len(set(broken.versions)) > 3


def test_the_first_draw_of_the_prompt_has_the_seed_of_the_episode_and_others_have_their_own() -> (
    None
):
    stream = Stream()
    s = session(stream)

    async def work() -> None:
        await s.draw(PROMPT.tokens)
        await s.draw(PROMPT.tokens)
        await s.draw(T([1]))
        await s.draw(T([1]))

    run(work())
    seeds = [params.seed for _, params in stream.calls]
    assert seeds[0] == 11 and len(set(seeds)) == 4 and all(0 <= seed < 2**63 for seed in seeds)


def test_the_order_of_parallel_requests_changes_no_token() -> None:
    openings = [T([7, 8]), T([1]), T([2, 3]), T([4])]

    def drawn(order: list[int]) -> list[list[int]]:
        s = session(Stream())

        async def work() -> list[list[int]]:
            turns = await asyncio.gather(*(s.draw(openings[i]) for i in order))
            return [turn.tokens.tolist() for turn in turns]

        tokens = run(work())
        return [tokens[order.index(i)] for i in range(4)]

    assert drawn([0, 1, 2, 3]) == drawn([3, 1, 0, 2]) == drawn([2, 3, 1, 0])


def test_a_turn_that_two_turns_continue_is_trained_in_the_first_thread_alone() -> None:
    s = session(Stream())

    async def work() -> None:
        root = await s.draw(PROMPT.tokens)
        await asyncio.gather(s.draw(T([50]), after=0), s.draw(T([60]), after=0), s.draw(T([9])))
        s.reward(0.5, root.number)
        s.reward(0.25)

    run(work())
    done = s.trajectory(Ending(messages=({"role": "user", "content": "x"},)))
    turns = s.turns
    one, two, three = done.threads
    assert [x.opening for x in done.threads] == [None, None, T([9])]
    assert [(x.author, x.tokens) for x in one.segments] == [
        (Author.POLICY, turns[0].tokens), (Author.ENVIRONMENT, T([50])), (Author.POLICY, turns[1].tokens),
    ]  # fmt: skip
    assert [(x.author, x.tokens) for x in two.segments] == [
        (Author.ENVIRONMENT, turns[0].tokens), (Author.ENVIRONMENT, T([60])), (Author.POLICY, turns[2].tokens),
    ]  # fmt: skip
    assert three.segments == (
        Segment(turns[3].tokens, log_probs=turns[3].segments[0].log_probs, stop=turns[3].stop, version=0, reward=0.25),
    )  # fmt: skip
    assert one.segments[0].reward == 0.5 and done.last_turn == turns[3].tokens
    assert done.num_policy_tokens == sum(len(t.tokens) for t in turns)
    assert done.counts["turns"] == 4 and done.counts["threads"] == 3
    assert done.counts["context_tokens"] == 5 and done.counts["ended/done"] == 1


def test_dead_and_replaced_turns_are_counted_and_never_trained_unless_they_are_continued() -> None:
    s = session(Stream())

    async def work() -> None:
        for _ in range(3):  # three draws of one context; the last one counts
            await s.draw(PROMPT.tokens)
        s.kill(2)
        await s.draw(T([5]), after=1)
        s.kill(1)  # too late: turn 3 continues it
        await s.draw(T([5]), after=1)
        s.kill(4)
        for turn in (0, 1, 3, 4, 4):
            s.reward(1.0, turn)

    run(work())
    assert "dead_rewards" not in s.trajectory().counts
    done = s.trajectory(Ending())
    assert [r for r in (x.reward for x in done.segments) if r] == [1.0, 1.0]
    assert done.counts["dead_rewards"] == 2  # of turns 0 and 4
    assert [t.number for t in s.turns] == [0, 1, 2, 3, 4]
    drawn = [len(t.tokens) for t in s.turns]
    assert done.tokens.tolist() == [*s.turns[1].tokens, 5, *s.turns[3].tokens]
    assert done.dead_tokens == drawn[0] + drawn[2] + drawn[4] and done.counts["dead_turns"] == 3


def test_every_drawn_token_is_trained_once_or_dead_for_any_tree() -> None:
    for seed in range(40):
        rng, s = random.Random(seed), session(Stream())

        async def work(rng: random.Random = rng, s: Session = s) -> None:
            for _ in range(12):
                known = [t.number for t in s.turns]
                after = rng.choice([None, *known])
                opening = PROMPT.tokens if rng.random() < 0.5 else T([rng.randrange(9)])
                context = opening if after is None else T([rng.randrange(3)] * rng.randrange(1, 3))
                await s.draw(context, after=after)
                if rng.random() < 0.3:
                    s.kill(rng.choice([t.number for t in s.turns]))

        run(work())
        done = s.trajectory(Ending())
        assert done.num_policy_tokens + done.dead_tokens == sum(len(t.tokens) for t in s.turns)
        assert done.counts["turns"] + done.counts["dead_turns"] == 12


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (Limits(max_turns=2), "turns"),
        (Limits(max_len=40), "context"),
        (Limits(max_episode_tokens=60), "tokens"),
    ],
)
def test_a_limit_without_room_for_a_token_says_its_name(limits: Limits, limit: str) -> None:
    s = session(Stream(), limits)

    async def work() -> None:
        turn = await s.draw(PROMPT.tokens)
        while True:
            assert len(s.tokens(turn.number)) <= (limits.max_len or 500)
            turn = await s.draw(T([1] * 9), after=turn.number)

    with pytest.raises(LimitReached) as error:
        run(work())
    assert error.value.limit == limit
    if limits.max_turns:
        assert len(s.turns) == 2


def test_each_limit_lowers_the_tokens_of_a_turn() -> None:
    def asked(limits: Limits, opening: Tokens = PROMPT.tokens, **more: Any) -> int:
        stream = Stream()
        run(session(stream, limits, room=30).draw(opening, **more))
        return stream.calls[0][1].max_tokens

    assert asked(Limits()) == 30
    assert asked(Limits(max_len=20)) == 18
    assert asked(Limits(max_len=100), T([1])) == 99, "only the prompt's thread has its limit"
    assert asked(Limits(max_tokens_per_turn=5)) == 5
    assert asked(Limits(max_episode_tokens=12)) == 10
    assert asked(Limits(), max_tokens=4) == 4 and asked(Limits(), max_tokens=400) == 30
    with pytest.raises(ValueError, match="at least one token"):
        asked(Limits(), max_tokens=0)


def test_a_turn_of_its_own_stop_strings_keeps_those_of_the_run() -> None:
    stream = Stream()
    params = SamplingParams(5, stop=("a",))
    run(Session(stream, PROMPT, params, "3/0").draw(PROMPT.tokens, stop=["b"]))
    assert stream.calls[0][1].stop == ("a", "b")


def test_a_cancelled_turn_is_dead_with_the_tokens_that_it_had() -> None:
    stream = Stream(cuts=lambda drawn: drawn == 1)
    s = session(stream)

    async def work() -> None:
        asleep = asyncio.Event()
        inner, calls = s._draw, 0

        async def stuck(*args: Any) -> tuple[Segment, ...]:
            nonlocal calls
            calls += 1
            if calls == 2:
                asleep.set()
                await asyncio.sleep(60)
            return await inner(*args)

        s._draw = stuck
        task = asyncio.create_task(s.draw(PROMPT.tokens))
        await asleep.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        s._draw = inner
        await s.draw(T([4]))

    run(work())
    done = s.trajectory(Ending())
    assert done.dead_tokens == 1 and len(done.threads) == 1 and done.threads[0].opening == T([4])


def test_a_turn_that_is_cancelled_before_its_first_token_is_counted() -> None:
    s = session(Stream())
    inner = s._draw

    async def stuck(*_: Any) -> tuple[Segment, ...]:
        await asyncio.sleep(60)
        return ()

    async def work() -> None:
        s._draw = stuck
        task = asyncio.create_task(s.draw(PROMPT.tokens))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        s._draw = inner
        assert not s.turns
        await s.draw(PROMPT.tokens)
        assert [t.number for t in s.turns] == [1]

    run(work())
    done = s.trajectory(Ending())
    assert (done.counts["turns"], done.counts["dead_turns"], done.dead_tokens) == (1, 1, 0)
    assert len(done.threads) == 1


def test_a_recorded_turn_that_has_less_room_now_ends_there() -> None:
    """Before the restart, both turns ran at once. Now the other one has its tokens already."""
    other = said([5] * 60), T([9, 9])
    cut = Thread((said([5] * 80, Stop.INTERRUPTED),))
    so_far = Trajectory((cut, Thread((other[0],), other[1])))
    s = session(stream := Stream(), Limits(max_episode_tokens=105), so_far=so_far)

    async def work() -> list[Turn]:
        return [await s.draw(T([9, 9])), await s.draw(PROMPT.tokens)]

    turns = run(work())
    assert not stream.calls and [len(t.tokens) for t in turns] == [60, 80]
    assert [t.stop for t in turns] == [Stop.EOS, Stop.LENGTH]


def test_recorded_turns_are_served_after_a_restart_as_long_as_contexts_are_equal() -> None:
    """The attempt before was cut in its third turn. Its agent asks for the same contexts again."""
    seen: list[Trajectory] = []
    calm = run(three_turns(session(Stream())))
    before = len(calm.threads[0].segments[0].tokens) + len(calm.threads[0].segments[2].tokens)
    cut = Stream(cuts=lambda drawn: drawn == before + 1)
    run(three_turns(session(cut, on_progress=seen.append)))
    so_far = next(t for t in seen if t.stop is Stop.INTERRUPTED)
    assert not so_far.finished and so_far.num_policy_tokens == before + 1
    again = Stream()
    done = run(three_turns(session(again, so_far=so_far)))
    assert plain(done) == plain(calm)
    assert len(again.calls) == 1 and again.calls[0][1].offset == 1, "only the rest was drawn"


def test_a_record_is_dropped_where_the_context_differs() -> None:
    seen: list[Trajectory] = []
    run(three_turns(session(Stream(), on_progress=seen.append)))
    again = Stream()

    async def other(s: Session) -> Trajectory:
        first = await s.draw(PROMPT.tokens)
        await s.draw(T([77]), after=first.number)
        return s.trajectory(Ending())

    done = run(other(session(again, so_far=seen[-1])))
    assert len(again.calls) == 1 and again.calls[0][0][-1] == 77
    assert done.threads[0].segments[0] == seen[-1].threads[0].segments[0]


def test_misuse_is_refused() -> None:
    s = session(Stream())
    with pytest.raises(ValueError, match="turn 0: a finished turn is needed"):
        s.tokens(0)
    with pytest.raises(EpisodeError, match="empty_context"):
        run(s.draw(T()))
    run(s.draw(PROMPT.tokens))
    with pytest.raises(EpisodeError, match="reward_not_finite"):
        s.reward(float("nan"))
    s.trajectory(Ending())
    with pytest.raises(EpisodeError, match="episode_over"):
        run(s.draw(T([1])))


def test_an_episode_without_a_token_has_no_thread() -> None:
    done = session(Stream()).trajectory(Ending("context"))
    assert done.threads == () and done.finished and done.stop is Stop.LENGTH
    assert done.tokens == T() and done.last_turn == T()


def test_one_response_keeps_the_shape_of_a_single_thread() -> None:
    s = session(Stream(), plain=True)
    turn = run(s.draw(PROMPT.tokens))
    assert s.trajectory(Ending()) == Trajectory((Thread(turn.segments),), ended="done")
