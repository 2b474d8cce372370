"""An engine that draws what hurts, and the check that each drawn token is trained once or dead."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from millrace.agents.conversation import Conversation
from millrace.agents.parse import tool_format
from millrace.agents.render import Renderer
from millrace.rollout.session import Limits, Session
from millrace.types import (
    UNFINISHED,
    Author,
    Ending,
    Prompt,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)

TEMPLATE = """{%- if tools -%}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else -%}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\
</tool_call>{% endfor -%}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """Return a byte-level tokenizer with a few merges, control tokens and a template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = (
        'hello the sum of numbers {"name": "add", "arguments": {"a": 12, "b": 7}} user assistant'
    )
    made.train_from_iterator([words, TEMPLATE] * 4, trainer)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.add_special_tokens([AddedToken(text, special=True) for text in control])
    made.add_tokens([AddedToken(text) for text in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


def split_anywhere(text: str, rng: random.Random) -> list[int]:
    """Return tokens of a text that the tokenizer itself would not choose."""
    marks = {t.content: i for i, t in tokenizer().added_tokens_decoder.items()}
    ids: list[int] = []
    while text:
        mark = next((m for m in marks if text.startswith(m)), None)
        if mark is not None:
            ids.append(marks[mark])
            text = text[len(mark) :]
            continue
        length = rng.randint(1, 4)
        ahead = min((k for m in marks if (k := text.find(m)) > 0), default=len(text))
        piece = text[: min(length, ahead)]
        ids += tokenizer().encode(piece, add_special_tokens=False)
        text = text[len(piece) :]
    return ids


@dataclass(slots=True)
class Drawn:
    """One turn as the engine drew it."""

    context: bytes
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def key(self) -> tuple[Any, ...]:
        return self.context, tuple(self.tokens), tuple(self.log_probs), tuple(self.versions)


class Engine:
    """Draws turns that depend on their seed alone, under weights that change all the time."""

    def __init__(self, calls: float = 0.5) -> None:
        self.calls = calls
        self.log: dict[str, dict[int, Drawn]] = {}
        """Every turn by episode and seed."""
        self._version = 0
        self._rng = random.Random(0)

    async def draw(self, tokens: Tokens, params: SamplingParams, name: str) -> tuple[Segment, ...]:
        rng = random.Random(params.seed)
        whole, stop = self._turn(rng, params)
        done = params.offset
        log = self.log.setdefault(name, {})
        held = tokens[: len(tokens) - done].tobytes()
        drawn = log.setdefault(params.seed, Drawn(held))
        assert drawn.context == held and drawn.tokens == whole[:done]
        rest = whole[done : done + params.max_tokens]
        if len(rest) < len(whole) - done:
            stop = Stop.LENGTH
        if len(rest) > 2 and self._rng.random() < 0.2:
            rest, stop = rest[: self._rng.randrange(len(rest))], Stop.INTERRUPTED
        segments = []
        for part in self._cut(rest):
            self._version += self._rng.random() < 0.3
            log_probs = floats_of(-rng.random() * 20 for _ in part)
            segments.append(Segment(tokens_of(part), Author.POLICY, self._version, log_probs))
            drawn.tokens += part
            drawn.log_probs += log_probs
            drawn.versions += [self._version] * len(part)
        if segments:
            last = segments[-1]
            segments[-1] = Segment(last.tokens, last.author, last.version, last.log_probs, stop)
        return tuple(segments)

    def _cut(self, ids: list[int]) -> list[list[int]]:
        if len(ids) < 2 or self._rng.random() < 0.5:
            return [ids] if ids else []
        middle = self._rng.randrange(1, len(ids))
        return [ids[:middle], ids[middle:]]

    def _turn(self, rng: random.Random, params: SamplingParams) -> tuple[list[int], Stop]:
        """Return a whole turn. Its end mark is the last token, unless a limit or string cuts it."""
        end = tokenizer().eos_token_id
        assert isinstance(end, int)
        if rng.random() < self.calls:
            return [*split_anywhere(self._calls(rng), rng), end], Stop.EOS
        kind = rng.choice(["ids", "bytes", "text", "empty", "long", "broken", "string"])
        size = len(tokenizer())
        if kind == "empty":
            return [end], Stop.EOS
        if kind in ("ids", "long"):
            length = 40 if kind == "long" else rng.randint(1, 12)
            ids = [t for t in (rng.randrange(size) for _ in range(length)) if t != end]
            return ([*ids, end], Stop.EOS) if kind == "ids" else (ids * 20, Stop.LENGTH)
        if kind == "bytes":
            return [*(rng.randrange(256) for _ in range(rng.randint(1, 9))), end], Stop.EOS
        text = rng.choice(["the sum is 19", "naïve 数 🙂", " \n ", "é" * 5, '"quoted" \\ {}'])
        if kind == "broken":
            text += '<tool_call>{"name": "add", "arguments": </tool_call>'
        if kind == "string" and params.stop:
            return split_anywhere(text + params.stop[0], rng), Stop.STRING
        return [*split_anywhere(text, rng), end], Stop.EOS

    def _calls(self, rng: random.Random) -> str:
        texts = [rng.choice(["", "let me see 🙂", "é"])]
        for _ in range(rng.choice([1, 1, 2, 3])):
            given = {"a": rng.randrange(99), "b": rng.choice([7, -1, 0])}
            text = json.dumps(
                {"name": "add", "arguments": dict(rng.sample(list(given.items()), 2))},
                separators=rng.choice([(",", ":"), (", ", ": "), (" ,\n", " :  ")]),
            )
            texts.append(f"<tool_call>{text}</tool_call>")
        return "".join(texts)


def episode_of(
    engine: Engine, name: str, seed: int, max_turns: int = 12
) -> tuple[Session, Conversation]:
    """Return the session and the conversation of a new episode."""
    start = tokens_of(tokenizer().encode("hello", add_special_tokens=False))
    prompt = Prompt(0, start, "hello", "test")
    params = SamplingParams(max_tokens=64, seed=seed)
    limits = Limits(
        max_len=6000, max_turns=max_turns, max_tokens_per_turn=64, max_episode_tokens=60_000
    )
    session = Session(engine.draw, prompt, params, name, limits)
    return session, Conversation(session, Renderer(tokenizer()), tool_format("hermes"))


def finish(session: Session, talk: Conversation) -> Trajectory:
    """Return the trajectory of an episode that is over."""
    talk.end_dead_turns()
    return session.trajectory(Ending("done", Score(1.0), talk.messages))


def differences(trajectory: Trajectory, engine: Engine, session: Session) -> list[str]:
    """Return every difference between what is trained and what the engine drew."""
    drawn = Counter(turn.key() for turn in engine.log.get(session.name, {}).values())
    found = []
    trained = Counter(trained_turns(trajectory, session.prompt.tokens))
    for key, times in trained.items():
        if times > 1:
            found.append(f"a turn is trained {times} times: {key[1][:8]}")
        if times > drawn[key]:
            found.append(f"a turn was never drawn like that: {key[1][:8]}")
    whole = sum(len(turn.tokens) for turn in engine.log.get(session.name, {}).values())
    used = sum(len(key[1]) * times for key, times in trained.items())
    if whole != used + trajectory.dead_tokens:
        found.append(f"{whole} tokens were drawn: {used} trained, {trajectory.dead_tokens} dead")
    return found


def trained_turns(trajectory: Trajectory, prompt: Tokens) -> list[tuple[Any, ...]]:
    """Return each trained turn with its context, tokens, log-probs and versions."""
    turns = []
    for thread in trajectory.threads:
        so_far = (prompt if thread.opening is None else thread.opening)[:]
        now: Drawn | None = None
        for segment in thread.segments:
            if segment.author is Author.POLICY:
                now = now or Drawn(so_far.tobytes())
                now.tokens += segment.tokens
                now.log_probs += segment.log_probs
                now.versions += [segment.version] * len(segment.tokens)
                if segment.stop not in UNFINISHED:
                    turns.append(now.key())
                    now = None
            so_far += segment.tokens
        assert now is None
    return turns
