"""Real clients at a real endpoint: each drawn token is trained once, or is dead and counted."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the endpoint listens with aiohttp")
import openai

from millrace.agents.service import Service
from millrace.agents.transport import client_of
from tests.agents.adversary import Engine, differences, episode_of, finish
from tests.agents.clients import CLIENTS, QUESTION, SYSTEM, TOOL, chat_with
from tests.agents.episodes import endpoint, tally
from tests.agents.talks import in_loop, options

EPISODES = 8
PACKAGES = {"openai-agents": "agents", "openai-agents-responses": "agents"}
CUT = {"ModelBehaviorError", "UnexpectedModelBehavior"}
"""What clients raise if a limit cut the policy's turn, or if it is empty."""


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("name", CLIENTS)
@in_loop
async def test_each_drawn_token_is_trained_once(name: str, stream: bool) -> None:
    pytest.importorskip(PACKAGES.get(name, name.replace("-", "_")))
    async with endpoint() as served:
        found = await tally(served, CLIENTS[name], stream, EPISODES)
    assert not found.failed and not found.differences
    assert found.turns > EPISODES and found.tokens > 100 and not found.raised.keys() - CUT
    if name == "smolagents":  # It rewrites calls and results, so that few turns share a thread.
        assert sum(found.threads[k] for k in (1,)) == 0
    elif name != "pydantic-ai":  # It leaves empty answers out.
        assert found.threads == {1: EPISODES} and not found.forks


@in_loop
async def test_a_client_in_this_process_draws_the_same_tokens() -> None:
    engines = []
    for http in (True, False):
        engine = Engine()
        engines.append(engine)
        async with endpoint() as served:
            for k in range(EPISODES):
                session, talk = episode_of(engine, f"{k}", k)
                live = served.service.open(talk, session)
                if http:
                    base = served.url + "/v1"
                    async with openai.AsyncOpenAI(base_url=base, api_key=live.key) as client:
                        await chat_with(client, stream=False)
                else:
                    await chat_with(client_of(served.service, live.key), stream=False)
                await served.service.end(live)
                assert not differences(finish(session, talk), engine, session)
    ids = [
        {name: [turn.tokens for turn in turns.values()] for name, turns in engine.log.items()}
        for engine in engines
    ]
    assert ids[0] == ids[1] and len(ids[0]) == EPISODES


@in_loop
async def test_a_client_in_this_process_streams_and_reads_errors() -> None:
    service = Service(options())
    session, talk = episode_of(Engine(calls=0.0), "0/0", 3, max_turns=2)
    live = service.open(talk, session)
    client = client_of(service, live.key)
    asked: Any = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}]}
    stream = await client.chat.completions.create(stream=True, **asked)
    assert [chunk async for chunk in stream][-1].choices[0].finish_reason in ("stop", "length")
    unread = await client.chat.completions.create(stream=True, **asked)
    await unread.close()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**asked)
    assert refused.value.code == "max_turns_reached"
    await service.end(live)
    one = finish(session, talk)
    assert one.counts["turns"] == one.counts["dead_turns"] == 1
    with pytest.raises(openai.BadRequestError, match="episode is over"):
        await client.models.list()


@in_loop
async def test_a_compacting_agent_has_two_threads() -> None:
    engine = Engine(calls=0.0)
    service = Service(options())
    session, talk = episode_of(engine, "0/0", 1)
    live = service.open(talk, session)
    client = client_of(service, live.key)
    system: Any = {"role": "system", "content": SYSTEM}
    messages: list[Any] = [system, {"role": "user", "content": QUESTION}]
    for step in range(4):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.model_dump(exclude_none=True)
        messages += [said, {"role": "user", "content": "go on"}]
        if step == 1:
            messages = [system, {"role": "user", "content": f"Summary: {said['content']}"}]
    await service.end(live)
    one = finish(session, talk)
    assert len(one.threads) == 2 and one.counts["turns"] == 4
    assert not differences(one, engine, session)


@pytest.mark.parametrize("order", range(3))
@in_loop
async def test_parallel_sub_agents_have_a_thread_each(order: int) -> None:
    engine = Engine()
    service = Service(options())
    session, talk = episode_of(engine, "0/0", 1)
    live = service.open(talk, session)
    rng = random.Random(order)
    tools: Any = [TOOL]

    async def sub_agent(name: str) -> None:
        client = client_of(service, live.key)
        messages: list[Any] = [
            {"role": "system", "content": f"You are {name}."},
            {"role": "user", "content": QUESTION},
        ]
        for _ in range(3):
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "1"})

    await asyncio.gather(*(sub_agent(name) for name in ("one", "two", "three", "four")))
    await service.end(live)
    one = finish(session, talk)
    assert len(one.threads) == 4 and one.counts["turns"] == 12
    assert not differences(one, engine, session)
    drawn = {tuple(turn.tokens) for turn in engine.log["0/0"].values()}
    assert drawn == _seen.setdefault("sub-agents", drawn)


_seen: dict[str, set[tuple[int, ...]]] = {}
"""The tokens of the first order of arrival. Those of another order are equal."""
