"""A conversation with a made model whose turns are given texts, through the real parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from millrace.agents.chat_agent import ChatAgent, ChatOptions
from millrace.agents.conversation import Conversation
from millrace.agents.parse import FORMATS
from millrace.agents.render import Renderer
from millrace.data.chat import Chat
from millrace.data.rows import Problem
from millrace.data.tokenizer import make_tokenizer
from millrace.environments.chat import ChatEnvironment
from millrace.environments.tools import CallLimits
from millrace.rollout.episode import run_episode
from millrace.rollout.session import NO_LIMITS, Limits
from millrace.types import (
    Prompt,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)
from tests.waiting import HANG_S

LETTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;?!=>_{}[]()'\"\\/<|+-*`\n"
)
TOKENIZER = make_tokenizer("chars", [LETTERS], 0, roles=True)
CHAT = Chat(TOKENIZER)
EOS = tokens_of(CHAT.eos_ids[:1])


def prompt_of(content: str, **values: Any) -> Prompt:
    _, tokens = CHAT.render(Problem([{"role": "user", "content": content}], "test"))
    return Prompt(0, tokens, content, "test", **values)


def agent_of(
    make: Callable[[Prompt], ChatEnvironment],
    options: ChatOptions | None = None,
    form: str = "line",
) -> ChatAgent:
    return ChatAgent(
        make,
        lambda session: Conversation(session, Renderer(TOKENIZER), FORMATS[form]),
        options or ChatOptions(CallLimits(deadline_s=HANG_S)),
    )


def play(
    agent: ChatAgent,
    prompt: Prompt,
    texts: Sequence[str],
    limits: Limits = NO_LIMITS,
    **more: Any,
) -> Trajectory:
    """Return the episode in which the policy says `texts`, one in each turn."""
    said = iter(texts)

    async def draw(tokens: Tokens, params: SamplingParams, name: str) -> tuple[Segment, ...]:
        drawn = tokens_of(CHAT.encode(next(said))) + EOS
        stop = Stop.EOS
        if len(drawn) > params.max_tokens:
            drawn, stop = drawn[: params.max_tokens], Stop.LENGTH
        return (Segment(drawn, version=0, log_probs=floats_of([-1.0] * len(drawn)), stop=stop),)

    return asyncio.run(
        run_episode(draw, agent, prompt, SamplingParams(5000, seed=1), "0/0", limits=limits, **more)
    )
