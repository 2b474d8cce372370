"""Conversations over a real Session: every drawn token is trained as it was drawn, or dead."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from millrace.agents.request import RequestError
from millrace.types import Message, tokens_of
from tests.agents.families import FAMILIES
from tests.agents.fuzz import Meddler, honest
from tests.agents.players import TOOLS, Table, following, renderer_of, sent_back

USER: Message = {"role": "user", "content": "hello"}
SYSTEM: Message = {"role": "system", "content": "be kind"}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'


@pytest.mark.parametrize("family", FAMILIES)
def test_a_client_that_does_not_edit_has_one_thread(family: str) -> None:
    for seed in range(15):
        asyncio.run(honest(family, seed))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("history", ["keep", "template"])
def test_a_client_that_edits_loses_no_token(family: str, history: str) -> None:
    async def play() -> None:
        did: Counter[str] = Counter()
        for seed in range(10):
            meddler = Meddler(family, seed, history=history)
            await meddler.play(5)
            did += meddler.did
        assert len(did) > 7

    asyncio.run(play())


def one(message: str | None, *calls: str) -> Message:
    """Return an answer as an agent sends it that writes its own messages."""
    functions = [{"name": "lookup", "arguments": a} for a in calls]
    made: Message = {"role": "assistant", "content": message}
    if calls:
        made["tool_calls"] = [{"id": "x", "type": "function", "function": f} for f in functions]
    return made


def test_calls_match_by_meaning_where_the_client_has_ids_of_its_own() -> None:
    async def play() -> None:
        table = Table.laid("qwen2.5", 0, texts=(CALL, "so"))
        await table.ask(USER)
        result = {"role": "tool", "tool_call_id": "x", "content": "b"}
        await table.ask(USER, one(None, '{"key":"a"}'), result)
        assert table.session.turns[1].after == 0
        changed = await table.ask(USER, one(None, '{"key": "b"}'), result)
        assert table.session.turns[changed.number].after is None
        assert table.end().counts["forks/edited"] == 1

    asyncio.run(play())


def test_an_id_with_other_arguments_is_an_edit() -> None:
    async def play() -> None:
        table = Table.laid("qwen2.5", 0, texts=(CALL, "so"))
        turn = await table.ask(USER)
        message = sent_back(turn, Random(0))
        message["tool_calls"][0]["function"]["arguments"] = '{"key": "other"}'
        await table.ask(USER, message, *following(turn, Random(0)))
        assert table.session.turns[1].after is None

    asyncio.run(play())


def test_ids_tell_equal_calls_of_siblings_apart() -> None:
    async def play() -> None:
        table = Table.laid("qwen2.5", 0, texts=(CALL, CALL, CALL, "so"))
        turns = await asyncio.gather(*(table.ask(USER) for _ in range(3)))
        assert len({t.message["tool_calls"][0]["id"] for t in turns}) == 3
        for turn in turns:
            assert all(len(c["id"]) == 9 and c["id"].isalnum() for c in turn.message["tool_calls"])
        await table.ask(USER, turns[1].message, *following(turns[1], Random(0)))
        assert table.session.turns[3].after == 1
        assert table.end().counts["dead_turns"] == 2

    asyncio.run(play())


def test_tokens_do_not_depend_on_the_order_of_parallel_agents() -> None:
    async def play(order: list[int]) -> dict[int, list[list[int]]]:
        table = Table.laid("mistral-v0.3", 3, form="json", cut=0.0)
        drawn = {}
        for n in order:
            messages: list[Message] = [SYSTEM | {"content": f"agent {n}"}, USER]
            turns = []
            for _ in range(3):
                turn = await table.ask(*messages)
                turns.append(turn.tokens.tolist())
                messages += [turn.message, *following(turn, Random(n))]
            drawn[n] = turns
        assert len(table.end().threads) == len(order)
        return drawn

    assert asyncio.run(play([0, 1, 2])) == asyncio.run(play([2, 0, 1]))


def test_an_undelivered_turn_is_dead_unless_it_is_extended() -> None:
    async def play(extend: bool) -> None:
        table = Table.laid("qwen2.5", 0, texts=("a", "b"))
        turn = await table.ask(USER)
        table.talk.undelivered(turn.number)
        if extend:
            await table.ask(USER, turn.message, USER)
        trajectory = table.end()
        assert len(trajectory.threads) == int(extend)
        assert bool(trajectory.dead_tokens) == (not extend)

    asyncio.run(play(extend=True))
    asyncio.run(play(extend=False))


def test_of_siblings_the_last_delivered_one_is_trained() -> None:
    async def play() -> None:
        table = Table.laid("qwen2.5", 0, texts=("a", "b", "c"))
        turns = [await table.ask(USER) for _ in range(3)]
        table.talk.delivered(turns[1].number)
        table.talk.undelivered(turns[2].number)
        (thread,) = table.end().threads
        drawn = [t for s in thread.segments for t in s.tokens]
        assert drawn == turns[1].tokens.tolist()
        assert table.talk.messages[-1]["content"] == "b"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        ([{"role": "system", "content": "you search"}, USER], "subagent"),
        ([SYSTEM, USER | {"content": "so far: a"}], "compacted"),
        ([SYSTEM, USER, one("other"), USER], "edited"),
        ([SYSTEM, USER, one("a"), USER | {"content": "rather"}], "edited"),
        ([SYSTEM, *[USER | {"content": "x"}, one("y")] * 3, USER], "foreign"),
    ],
)
def test_forks_are_counted_by_cause(messages: list[Message], cause: str) -> None:
    async def play() -> None:
        table = Table.laid("qwen2.5", 0, texts=("a", "b", "c", "d"))
        await table.ask(SYSTEM, USER)
        await table.ask(SYSTEM, USER, one("a"), USER)
        await table.ask(*messages)
        counts = table.end().counts
        assert {k: v for k, v in counts.items() if "forks/" in k} == {f"forks/{cause}": 1}

    asyncio.run(play())


def test_other_tools_open_another_thread() -> None:
    async def play() -> None:
        table = Table.laid("qwen2.5", 0, texts=("a", "b"))
        await table.ask(USER)
        await table.ask(USER, one("a"), USER, tools=TOOLS[:1])
        assert table.end().counts["forks/tools"] == 1

    asyncio.run(play())


def test_dropped_thinking_opens_a_thread_where_history_is_the_templates() -> None:
    async def play(history: str) -> list[int | None]:
        text = "<think>\nso\n</think>\n\n"
        table = Table.laid("qwen3", 0, texts=(text + CALL, text + "a", "b"), history=history)
        messages: list[Message] = [USER]
        for n in range(3):
            turn = await table.ask(*messages)
            assert turn.message.get("reasoning_content") == ("so" if n < 2 else None)
            messages += [turn.message, *following(turn, Random(n))]
        trajectory = table.end()
        assert len(trajectory.threads) == 1 + (history == "template")
        counted = "kept_history" if history == "keep" else "forks/template"
        assert trajectory.counts[counted] == 1
        return [t.after for t in table.session.turns]

    assert asyncio.run(play("keep")) == [None, 0, 1]
    assert asyncio.run(play("template")) == [None, 0, None]


def test_auxiliary_models_are_served_and_never_trained() -> None:
    async def play() -> None:
        table = Table.laid("qwen2.5", 0, texts=("a", "title", "b"), main_models=("policy",))
        await table.ask(USER, model="policy")
        await table.ask(USER, model="small")
        await table.ask(USER, one("a"), USER, model="policy")
        trajectory = table.end()
        assert len(trajectory.threads) == 1 and trajectory.counts["auxiliary_turns"] == 1
        assert trajectory.dead_tokens == len(table.engine.log[1][1])
        assert [m["content"] for m in trajectory.messages] == ["hello", "a", "hello", "b"]

    asyncio.run(play())


def test_completions_continue_the_longest_prefix() -> None:
    async def play() -> None:
        table = Table.laid("qwen2.5", 0)
        talk = table.talk
        first = await talk.complete(tokens_of([7, 8]))
        held = tokens_of([7, 8]) + first.tokens
        await talk.complete(held + tokens_of([9]))
        await talk.complete(held[:-1] + tokens_of([1]))
        afters = [t.after for t in table.session.turns]
        assert afters == [None, 0, None]
        assert table.session.turns[1].context == tokens_of([9])
        assert len(table.end().threads) == 2

    asyncio.run(play())


@pytest.mark.parametrize("tokens", [[2**31 - 1], [7, -1]])
def test_completions_refuse_tokens_that_the_model_lacks(tokens: list[int]) -> None:
    table = Table.laid("qwen2.5", 0)
    with pytest.raises(RequestError, match="is unknown"):
        asyncio.run(table.talk.complete(tokens_of(tokens)))
    assert not table.engine.log


def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_tokens() -> None:
    async def play() -> None:
        from dataclasses import replace

        from millrace.types import Segment, Stop

        table = Table.laid("qwen2.5", 0, texts=("a weather table", "b"))
        draw = table.engine.draw

        async def stopping(tokens: object, params: object, session: str) -> tuple[Segment, ...]:
            *head, last = await draw(tokens, params, session)  # type: ignore[arg-type]
            cut = replace(last, tokens=last.tokens[:-1], log_probs=last.log_probs[:-1])
            return (*head, replace(cut, stop=Stop.STRING))

        table.session._draw = stopping  # type: ignore[assignment]
        turn = await table.ask(USER, stop=("table", "weather"))
        assert turn.message["content"] == "a " and turn.stopped_by == "weather"
        await table.ask(USER, turn.message, USER)
        text = renderer_of("qwen2.5").decode(
            table.session.turns[1].context, ["<|im_start|>", "<|im_end|>"]
        )
        assert text == "<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "critic", "content": "x"}, "critic"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool call"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(message: Message, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        asyncio.run(Table.laid("qwen2.5", 0).ask(message))
    with pytest.raises(RequestError, match="empty"):
        asyncio.run(Table.laid("qwen2.5", 0).ask())
    with pytest.raises(RequestError, match="System role not supported"):
        asyncio.run(Table.laid("gemma", 0).ask(SYSTEM, USER, tools=()))


def test_a_long_message_is_encoded_apart_to_the_same_tokens() -> None:
    async def play() -> None:
        table = Table.laid("qwen2.5", 0, texts=("a", "b"))
        turn = await table.ask(USER)
        long = "the table <|im_end|> " * 5000
        messages = [USER, turn.message, {"role": "user", "content": long}]
        await asyncio.gather(table.ask(*messages), table.ask(USER, turn.message, USER))
        known = [USER, {"role": "assistant", "content": "a"}]
        plain = renderer_of("qwen2.5").bridge(known, messages[2:], TOOLS, ended="<|im_end|>")
        context = max((t.context for t in table.session.turns), key=len)
        assert plain is not None and plain.tokens == context

    asyncio.run(play())


def test_a_template_that_hides_thinking_from_the_start_is_noticed() -> None:
    async def play(history: str) -> int | None:
        texts = ("so\n</think>\n\na", "b")
        table = Table.laid("deepseek-r1", 0, texts=texts, history=history)
        turn = await table.ask(USER)
        await table.ask(USER, turn.message, USER)
        return table.session.turns[1].after

    assert asyncio.run(play("keep")) == 0
    assert asyncio.run(play("template")) is None


def test_a_sibling_that_continues_in_another_thread_lives() -> None:
    async def play() -> None:
        texts = tuple(f"<think>\nso\n</think>\n\n{a}" for a in "abc")
        table = Table.laid("qwen3", 0, texts=texts, history="template")
        first = await table.ask(USER)
        await table.ask(USER)
        await table.ask(USER, first.message, USER)
        trajectory = table.end()
        assert len(trajectory.threads) == 2
        assert trajectory.dead_tokens == len(table.engine.log[1][1])

    asyncio.run(play())
