"""The chat agent: policy, tools and environment in turn, their failures and limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from millrace import codec
from millrace.agents.chat_agent import ChatOptions
from millrace.environments.chase import Chase
from millrace.environments.chat import Start, Step
from millrace.environments.task_tools import TaskWithTools
from millrace.environments.tools import CallLimits, Cut, FunctionTool
from millrace.errors import DataError, EpisodeError
from millrace.rollout.demonstration import demonstration
from millrace.rollout.session import Limits
from millrace.types import Author, Message, Prompt, Score, Trajectory
from tests.agents.scripts import CHAT, EOS, agent_of, play, prompt_of
from tests.waiting import HANG_S

CHASE = prompt_of("c3:7>", ground_truth="4", extra_info={"table": "0000400100"})

ROAD = ["?7.", "?1.", "?0."]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def tools_agent(*functions: Any, deadline_s: float = HANG_S, **options: Any) -> Any:
    made = ChatOptions(CallLimits(deadline_s, max_parallel=2), **options)
    return agent_of(
        lambda prompt: TaskWithTools(lambda _: [FunctionTool(f) for f in functions]), made, "hermes"
    )


def results(trajectory: Any) -> list[str]:
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


def test_an_episode_of_chase_has_one_thread_and_only_the_policy_s_tokens_are_its_own() -> None:
    table = extra = {"table": "0400000100"}
    prompt = prompt_of("c3:7>", ground_truth="0", extra_info=extra)
    assert table["table"][7] == "1" and table["table"][1] == "4" and table["table"][4] == "0"
    done = play(agent_of(lambda _: Chase()), prompt, ["?7.", "?1.", "?4.", "=0"])
    assert done.score == Score(1.0, answer="0") and done.ended == "done"
    assert len(done.threads) == 1
    texts = [(s.author, str(CHAT.tokenizer.decode(s.tokens.tolist()))) for s in done.segments]
    assert texts == [
        (Author.POLICY, "?7.<eos>"),
        (Author.ENVIRONMENT, "<tool>1<assistant>"),
        (Author.POLICY, "?1.<eos>"),
        (Author.ENVIRONMENT, "<tool>4<assistant>"),
        (Author.POLICY, "?4.<eos>"),
        (Author.ENVIRONMENT, "<tool>0<assistant>"),
        (Author.POLICY, "=0<eos>"),
    ]
    assert done.counts["turns"] == 4 and done.counts["tool_calls"] == 3
    assert done.counts["tool_seconds"] > 0


@pytest.mark.parametrize(
    ("texts", "score"),
    [(["=4"], 1.0), (["=5"], 0.0), (["4"], 0.0), (["?7.", "=4 "], 0.0), (["?x.", "=4"], 0.0)],
)
def test_the_score_of_chase_is_that_of_the_exact_answer(texts: list[str], score: float) -> None:
    done = play(agent_of(lambda _: Chase()), CHASE, texts)
    assert done.score is not None and done.score.value == score


def test_a_limit_ends_the_episode_with_a_score() -> None:
    agent = agent_of(lambda _: Chase())
    done = play(agent, CHASE, ROAD, Limits(max_turns=3))
    assert (done.ended, done.score) == ("turns", Score(0.0, answer=""))
    cut = play(agent, CHASE, ["?7.", "=4"], Limits(max_tokens_per_turn=2))
    assert cut.ended == "tokens" and cut.score.value == 0 and cut.num_policy_tokens == 2


def test_a_demonstration_has_the_tokens_of_the_episode() -> None:
    agent = agent_of(lambda _: Chase())
    texts = ["?7.", "?1.", "=0"]
    rolled = play(agent, CHASE, texts)
    example = asyncio.run(demonstration(agent, CHASE, texts, CHAT.encode, EOS))
    assert example[0] == CHASE.tokens
    assert list(example[1:]) == [s.tokens for s in rolled.segments]
    with pytest.raises(DataError, match="ended after 1 of its 2 turns"):
        asyncio.run(demonstration(agent, CHASE, ["=1", "=2"], CHAT.encode, EOS))


def test_every_call_has_one_result_also_the_refused_ones() -> None:
    text = "".join(call("add", a=n, b=1) for n in range(4))
    done = play(tools_agent(add), prompt_of("x"), [text, "done"])
    assert results(done) == ["1", "2", *["Error: too many calls: 2 at once at most"] * 2]
    calls = done.messages[1]["tool_calls"]
    answered = [m["tool_call_id"] for m in done.messages if m["role"] == "tool"]
    assert answered == [c["id"] for c in calls]
    assert done.counts["refused_calls"] == 2 and done.score is None


def test_what_a_tool_does_wrong_is_text_for_the_policy() -> None:
    async def slow(a: int) -> int:
        """Wait.

        Args:
            a: seconds
        """
        await asyncio.sleep(10_000)
        return a

    async def broken(a: int) -> int:
        """Raise.

        Args:
            a: anything
        """
        raise ZeroDivisionError("by zero")

    said = [call("slow", a=1), call("broken", a=1), call("none"), call("add", a="x", b=1), "end"]
    done = play(tools_agent(slow, broken, add, deadline_s=0.2), prompt_of("x"), said)
    assert results(done) == [
        "Error: the call took longer than 0.2 s",
        "Error: ZeroDivisionError: by zero",
        "Error: no tool 'none'; the tools are slow, broken, add",
        "Error: the argument 'a' must be of type integer",
    ]
    counts = {k: done.counts[k] for k in ("tool_timeouts", "tool_errors", "invalid_calls")}
    assert counts == {"tool_timeouts": 1, "tool_errors": 1, "invalid_calls": 2}


def test_failed_machinery_fails_the_episode() -> None:
    def lost(a: int) -> int:
        """Fail.

        Args:
            a: anything
        """
        raise ConnectionResetError("the tool server is gone")

    with pytest.raises(EpisodeError, match="the tool server is gone") as caught:
        play(tools_agent(lost), prompt_of("x"), [call("lost", a=1), "end"])
    assert caught.value.reason == "tool"


def test_a_long_result_is_cut_by_tokens_with_a_mark() -> None:
    def long(n: int) -> str:
        """Return a long text.

        Args:
            n: its length
        """
        return "a" * n + "z" * n

    cut = Cut(CHAT.encode, lambda t: str(CHAT.tokenizer.decode(t)), 20)
    said = [call("long", n=100), call("long", n=10), "end"]
    done = play(tools_agent(long, cut=cut), prompt_of("x"), said)
    assert results(done)[0] == "a" * 10 + "[... 180 characters cut ...]" + "z" * 10
    assert results(done)[1] == "a" * 10 + "z" * 10
    assert done.counts["cut_results"] == 1


class Game:
    """Asks three times, and rewards each answer with its number."""

    def __init__(self, step: Any = None) -> None:
        self.closed, self._n, self._step = False, 0, step

    async def reset(self, task: Prompt) -> Start:
        return Start(({"role": "user", "content": "go"},))

    async def step(self, message: Message) -> Step:
        if self._step is not None:
            return await self._step()  # type: ignore[no-any-return]
        self._n += 1
        said = {"role": "user", "content": f"again {message['content']}"}
        return Step((said,), done=self._n == 3, reward=float(self._n))

    async def score(self) -> Score | None:
        return Score(0.5)

    async def close(self) -> None:
        self.closed = True


def test_an_environment_speaks_and_rewards_single_turns() -> None:
    game = Game()
    done = play(agent_of(lambda _: game), prompt_of("go"), ["a", "b", "c"])
    rewards = [s.reward for s in done.segments if s.author is Author.POLICY]
    assert rewards == [1.0, 2.0, 3.0] and done.score == Score(0.5) and game.closed
    assert [m["content"] for m in done.messages] == ["go", "a", "again a", "b", "again b", "c"]


async def _fail() -> Step:
    raise KeyError("state")


async def _mute() -> Step:
    return Step()


async def _hang() -> Step:
    await asyncio.sleep(60)
    return Step()


async def _exit() -> Step:
    raise SystemExit(1)


async def _cancel() -> Step:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        *((step, "environment") for step in (_fail, _mute, _exit, _cancel)),
        (_hang, "environment_late"),
    ],
)
def test_a_failing_environment_fails_the_episode_and_is_closed(step: Any, reason: str) -> None:
    game = Game(step)
    options = ChatOptions(CallLimits(), environment_deadline_s=0.2)
    with pytest.raises(EpisodeError) as caught:
        play(agent_of(lambda _: game, options), prompt_of("go"), ["a"])
    assert caught.value.reason == reason and game.closed


def test_after_a_restart_recorded_turns_are_not_drawn_again() -> None:
    agent, texts = agent_of(lambda _: Chase()), ["?7.", "?1.", "=0"]
    seen: list[Any] = []
    whole = play(agent, CHASE, texts, on_progress=seen.append)
    resumed = play(agent, CHASE, texts[2:], so_far=seen[1])
    assert [s.tokens for s in resumed.segments] == [s.tokens for s in whole.segments]


BAD: dict[str, dict[str, Any]] = {
    "role": {"start": Start(({"role": "bot", "content": "3"},))},
    "no message": {"start": Start(())},
    "no object": {"start": Start(("3",))},  # type: ignore[arg-type]
    "no Start": {"start": {"messages": []}},
    "no tool": {"start": Start(({"role": "user", "content": "3"},), (5,))},  # type: ignore[arg-type]
    "image": {"step": Step(({"role": "user", "content": [{"type": "image_url"}]},))},
    "no Step": {"step": (1, 2)},
    "reward": {"step": Step((), True, "1")},  # type: ignore[arg-type]
    "score": {"score": 1.0},
    "value": {"score": Score("1")},  # type: ignore[arg-type]
    "extra": {"score": Score(1.0, {"a": "x"})},  # type: ignore[dict-item]
    "counts": {"counts": {"a": "x"}},
    "a reward that is not finite": {"step": Step((), True, float("inf"))},
    "a component that is not finite": {"score": Score(1.0, {"a": float("nan")})},
    "a count that is not finite": {"counts": {"a": float("nan")}},
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_of_an_environment_ends_its_episode_and_not_the_run(case: str) -> None:
    class Bad:
        counts = BAD[case].get("counts", {})

        async def reset(self, prompt: Prompt) -> Any:
            return BAD[case].get("start", Start(({"role": "user", "content": "3"},)))

        async def step(self, message: Message) -> Any:
            return BAD[case].get("step", Step(done=True))

        async def score(self) -> Any:
            return BAD[case].get("score")

        async def close(self) -> None: ...

    with pytest.raises(EpisodeError, match="environment"):
        play(agent_of(lambda _: Bad()), CHASE, ["=1", "=2"])


def test_half_a_character_in_a_tool_s_result_can_be_sent_and_saved() -> None:
    def half(a: int) -> str:
        """Answer.

        Args:
            a: anything
        """
        return f"{a}\ud800"

    done = play(tools_agent(half), prompt_of("x"), [call("half", a=1), "end"])
    assert results(done) == ["1\ufffd"]
    assert codec.from_json(codec.to_json(done), Trajectory) == done
