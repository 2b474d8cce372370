"""A judge: a model behind an OpenAI-compatible endpoint scores responses."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from millrace.config import JudgeConfig
from millrace.errors import RewardError
from millrace.rewards.endpoint import Endpoint, client_of
from millrace.rewards.wire import Call
from millrace.types import Score

_FIELD = re.compile(r"\{(prompt|response|ground_truth|data_source)\}")


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: float | None = None
    completion_tokens: float | None = None


class _Completion(msgspec.Struct):
    """The fields of a chat completion that a judge needs."""

    choices: list[_Choice]
    usage: _Usage | None = None


_completions = msgspec.json.Decoder(_Completion)


def message_of(config: JudgeConfig, call: Call, completion: str) -> str:
    """Return the message to the judge. The template's fields are filled in once, all together."""
    messages = call.columns.get("prompt")
    one = messages is not None and len(messages) == 1
    prompt = (
        call.prompt
        if messages is None
        else "\n\n".join(m["content"] if one else f"{m['role']}: {m['content']}" for m in messages)
    )
    values = {
        "prompt": prompt,
        "response": completion,
        "ground_truth": str(call.ground_truth),
        "data_source": call.data_source,
    }
    return _FIELD.sub(lambda match: values[match[1]], config.template)


def score_of(config: JudgeConfig, answer: str) -> float:
    """Return the score in the judge's answer. Raise RewardError if it has none within the bounds.

    The last match of the pattern counts, or the field of the answer's first JSON object.
    """
    text = _field_of(config, answer) if config.json_field else _match_of(config, answer)
    try:
        value = float(text)
    except (TypeError, ValueError, OverflowError):
        raise RewardError("not_a_number", f"the judge's score is {text!r:.80}") from None
    if not config.min <= value <= config.max:  # NaN is outside too
        bounds = f"{config.min:g} to {config.max:g}"
        raise RewardError("out_of_bounds", f"the judge's score is {value:g}, outside of {bounds}")
    return value


def _match_of(config: JudgeConfig, answer: str) -> str:
    matches = list(re.finditer(config.pattern, answer))
    if not matches:
        raise RewardError("no_score", f"no match of {config.pattern!r} in {answer!r:.200}")
    return matches[-1][1] or ""


def _field_of(config: JudgeConfig, answer: str) -> Any:
    try:
        fields, _ = json.JSONDecoder().raw_decode(answer, answer.index("{"))
    except (ValueError, RecursionError):
        raise RewardError("no_score", f"no JSON object in {answer!r:.200}") from None
    if config.json_field not in fields:
        raise RewardError("no_score", f"no field {config.json_field!r} in {answer!r:.200}")
    value = fields[config.json_field]
    return "true or false" if isinstance(value, bool) else value


@dataclass
class Judge(Endpoint[JudgeConfig]):
    """A coroutine function for the worker: it asks the endpoint and reads the score."""

    is_async: bool = True
    whole_group: bool = False

    @classmethod
    def load(cls, key: str, spec: dict[str, Any]) -> Judge:
        """Return the judge. `key` is the section's name.

        Raise ConfigError if OpenAI's own endpoint has no key, and MissingDependency without openai.
        """
        config = JudgeConfig.model_validate(spec)
        return cls(key, config, *client_of(key, config))

    async def run_async(self, call: Call) -> list[Score]:
        """Return the scores of a call's completions, one request for each. Raise RewardError."""
        return [await self._judge(message_of(self.config, call, text)) for text in call.completions]

    async def _judge(self, message: str) -> Score:
        c = self.config
        fields: dict[str, Any] = {"temperature": c.temperature} if c.temperature is not None else {}
        fields |= {"max_tokens": c.max_tokens} if c.max_tokens else {}
        completion = await self.ask(
            lambda: self.client.chat.completions.with_raw_response.create(
                model=c.model,
                messages=[{"role": "user", "content": message}],
                extra_body=c.extra_body,
                **fields,
            ),
            _completions,
        )
        if completion.usage is not None:
            self.figures["tokens_in"] += int(completion.usage.prompt_tokens or 0)
            self.figures["tokens_out"] += int(completion.usage.completion_tokens or 0)
        if not completion.choices:
            raise RewardError("bad_answer", "the endpoint's answer has no choices")
        if completion.choices[0].finish_reason == "length":
            raise RewardError("cut_off", self._too_short())
        answer = completion.choices[0].message.content
        if not answer:
            raise RewardError("no_score", "the judge's answer is empty")
        return Score(score_of(self.config, answer))

    def _too_short(self) -> str:
        """Return what ended the judge's answer, and the fix. Its score may be half a number."""
        key, most = f"{self.key}.max_tokens", self.config.max_tokens
        if most:
            return f"the judge's answer ended at {key} = {most}. Fix: a larger {key}"
        return (
            f"the judge's answer ended at the endpoint's own limit. Fix: {key}=N, above that limit"
        )
