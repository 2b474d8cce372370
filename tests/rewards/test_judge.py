"""The judge against a real HTTP server: its scores, its failures, its waits and its secret."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.config import JudgeConfig, RewardConfig
from millrace.errors import ConfigError, RewardError
from millrace.rewards.endpoint import seconds_of
from millrace.rewards.judge import Judge, message_of, score_of
from millrace.rewards.pool import RewardPool
from millrace.rewards.wire import Call
from millrace.types import Prompt, tokens_of
from tests.rewards.completions import completed
from tests.rewards.endpoint import Endpoint, endpoint
from tests.waiting import HANG_S, at_some_pace

SECRET = "sk-canary-0123456789"
PROMPT = Prompt(0, tokens_of([1]), "say nine", "d", "9")
TEMPLATE = "{prompt} [{ground_truth}] {response}"


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as state:
        yield state


def judge(server: Endpoint, **keys: Any) -> Judge:
    quick: dict[str, Any] = {"max_retries": 2, "retry_wait_s": 0.01, "template": TEMPLATE}
    config = JudgeConfig(**quick | {"model": "m", "base_url": server.url} | keys)
    return Judge.load("reward.judge", config.model_dump(mode="json"))


def asked(judge: Judge, *texts: str) -> Any:
    """Ask once. The client's connections belong to one event loop."""

    async def run() -> Any:
        async with judge.client:
            return await judge.run_async(Call(1, "say nine", "d", "9", {}, {}, list(texts)))

    return asyncio.run(run())


def reason(judge: Judge, text: str) -> str:
    with pytest.raises(RewardError) as caught:
        asked(judge, text)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_the_answer_is_the_score_and_the_tokens_are_counted(server: Endpoint) -> None:
    one = judge(server, extra_body={"seed": 5})
    assert [score.value for score in asked(one, "9", "199", "1")] == [1, 2, 0]
    assert one.take_figures() == {"requests": 3, "tokens_in": 30, "tokens_out": 9}
    assert one.take_figures() == {}
    messages = [r["messages"] for r in server.requests]
    assert [{"role": "user", "content": "say nine [9] 199"}] in messages
    first = server.requests[0]
    assert (first["model"], first["temperature"], first["max_tokens"], first["seed"]) == (
        "m",
        0,
        1024,
        5,
    )


@pytest.mark.parametrize(
    ("text", "match", "requests"),
    [
        ("limited", r"^rate_limited: the endpoint answered 429.*slow down.*2 retries", 3),
        ("down", r"^http_503: ", 3),
        ("forbidden", r"^http_401: .*bad key Bearer \*\*\*", 1),
        ("later", r"^rate_limited: .*0 retries, and .*timeout_s allow no further attempt", 1),
        ("html", r"^bad_answer: .*<html>hello", 1),
        ("broken", r"^bad_answer: ", 1),
        ("nothing", r"^bad_answer: .*no choices", 1),
        ("null", r"^no_score: .*empty", 1),
        ("silent", r"^no_score: .*rather not say", 1),
        ("cut", r"^cut_off: .*max_tokens = 1024\. Fix: a larger reward\.judge\.max_tokens", 1),
        ("huge", r"^out_of_bounds: .*11, outside of 0 to 10", 1),
    ],
)
def test_a_judge_without_a_score_is_a_failure_with_a_reason(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, text: str, match: str, requests: int
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    one = judge(server, request_timeout_s=HANG_S)
    assert re.search(match, reason(one, text))
    assert len(server.requests) == requests
    assert one.figures["requests"] == requests and one.figures["retries"] == requests - 1
    assert server.keys == {f"Bearer {SECRET}"}


def test_an_endpoint_that_is_not_there_is_a_failure() -> None:
    gone = Endpoint()
    with endpoint() as state:
        gone.url = state.url
    assert reason(judge(gone), "9").startswith("unreachable: no connection to the endpoint")


def test_a_retry_waits_as_long_as_the_endpoint_asks(server: Endpoint) -> None:
    one = judge(server)
    assert asked(one, "once")[0].value == 6  # the last match
    assert server.times[1] - server.times[0] >= 0.4
    assert one.take_figures() == {"requests": 2, "retries": 1, "tokens_in": 10, "tokens_out": 3}


def test_retry_after_is_seconds_or_a_date() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=3600), usegmt=True)
    assert 3600 - HANG_S < seconds_of(soon) <= 3600
    assert [seconds_of(text) for text in ("2.5", "", "soon", "-3")] == [2.5, 0, 0, 0]
    assert seconds_of("Thu, 01 Jan 1970 00:00:00 GMT") == 0


@pytest.mark.parametrize(("text", "piece"), [("slow", 0), ("9", 10)], ids=["never", "in drops"])
def test_an_answer_that_is_late_or_drips_ends_at_the_limit_of_a_request(
    text: str, piece: int
) -> None:
    """Of the drops, each read is quick, and all take much longer than the limit."""

    def scenario(seconds: float) -> None:
        with endpoint() as server:
            server.piece, server.piece_s = piece, seconds / 6 if piece else 0.0
            limit = rf"^timeout: .*reward\.judge\.request_timeout_s = {seconds:g}"
            one = judge(server, request_timeout_s=seconds)
            assert re.search(limit, reason(one, text))
            assert len(server.requests) == one.figures["requests"] == 3

    at_some_pace(scenario, 0.25)


def test_an_endpoint_may_leave_out_the_tokens_that_it_used(server: Endpoint) -> None:
    one = judge(server)
    assert asked(one, "free")[0].value == 7
    assert one.take_figures() == {"requests": 1, "tokens_in": 0, "tokens_out": 3}


def test_a_field_of_json_is_the_score(server: Endpoint) -> None:
    assert asked(judge(server, json_field="grade"), "json")[0].value == 4.5
    assert reason(judge(server, json_field="grade"), "truth").startswith("not_a_number")
    assert reason(judge(server, json_field="grade"), "digits").startswith("not_a_number")
    assert reason(judge(server, json_field="grade"), "deep").startswith("no_score: no JSON object")
    assert reason(judge(server, json_field="grade"), "9").startswith("no_score: no JSON object")
    assert reason(judge(server, json_field="mark"), "json").startswith("no_score: no field 'mark'")


@settings(max_examples=30)
@given(st.text(), st.text(), st.text())
def test_no_text_in_a_response_changes_the_template(prompt: str, response: str, end: str) -> None:
    hostile = response + "{prompt}{ground_truth}"
    call = Call(1, prompt, "d", "truth", {}, {}, [])
    config = JudgeConfig(template="<{prompt}|{response}|{other}>" + end.replace("{", ""))
    assert message_of(config, call, hostile) == f"<{prompt}|{hostile}|{{other}}>" + end.replace(
        "{", ""
    )


def test_messages_become_text_for_the_judge() -> None:
    config = JudgeConfig(template="{prompt}|{response}")
    turns = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    for messages, text in ((turns, "system: short\n\nuser: hi"), (turns[1:], "hi")):
        call = Call(1, "<rendered>", "d", None, {}, {"prompt": messages}, [])
        assert message_of(config, call, "yo") == f"{text}|yo"


@given(st.floats(-20, 20))
def test_a_score_is_within_its_bounds_or_an_error(value: float) -> None:
    config = JudgeConfig(pattern=r"SCORE: (\S+)", min=-1, max=2)
    answer = f"SCORE: 0 or rather SCORE: {value!r}"
    if -1 <= value <= 2:
        assert score_of(config, answer) == value
    else:
        with pytest.raises(RewardError, match="out_of_bounds"):
            score_of(config, answer)
    with pytest.raises(RewardError, match="out_of_bounds"):
        score_of(config, f"SCORE: {math.nan}")


def test_a_hosted_judge_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"reward\.judge\.api_key_env = 'OPENAI_API_KEY'"):
        Judge.load("reward.judge", JudgeConfig(model="m").model_dump(mode="json"))


@pytest.mark.parametrize("secret", ["sk-one\nsk-two", "sk-\x7f", "sk-caf\u00e9", "sk-a\tb"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    """The error of an HTTP client would show such a key, with its characters escaped."""
    monkeypatch.setenv("MY_KEY", secret)
    spec = JudgeConfig(model="m", api_key_env="MY_KEY", base_url="http://localhost:1/v1")
    with pytest.raises(ConfigError, match=r"^reward\.judge\.api_key_env = 'MY_KEY'") as caught:
        Judge.load("reward.judge", spec.model_dump(mode="json"))
    assert "sk-" not in str(caught.value)


def test_a_pool_of_judges_limits_requests_and_the_time_of_a_score() -> None:
    def scenario(seconds: float) -> None:
        with endpoint() as server:
            server.crowd = 4
            asyncio.run(_scores_of_judges(server, seconds))

    at_some_pace(scenario, 1.0)


async def _scores_of_judges(server: Endpoint, seconds: float) -> None:
    keys: dict[str, Any] = {"template": TEMPLATE, "max_concurrency": 4, "timeout_s": seconds}
    config = JudgeConfig(model="m", base_url=server.url, **keys)
    pool = RewardPool(RewardConfig(judge=config))
    try:
        await pool.start()
        texts = ["x" * i + "9" for i in range(24)]
        calls = (pool.score(PROMPT, completed([text])) for text in texts)
        scores = await asyncio.gather(*calls, return_exceptions=True)
        in_time = [score for score in scores if not isinstance(score, BaseException)]
        assert [score.value for (score,) in in_time] == [1] * 24
        assert server.most == 4
        with pytest.raises(RewardError, match=r"^timeout: .*reward\.judge\.timeout_s = "):
            await pool.score(PROMPT, completed(["slow"]))
        assert pool.figures == {"requests": 25, "tokens_in": 240, "tokens_out": 72}
    finally:
        await pool.close()
