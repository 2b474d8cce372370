"""A judge: a model behind an OpenAI-compatible endpoint scores responses.

The API key comes from the environment alone. No error shows it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from millrace.config import JudgeConfig
from millrace.errors import INSTALL, MissingDependency, RewardError, bad_value
from millrace.rewards.wire import Call
from millrace.types import Score

_LONGEST_WAIT_S = 60.0
"""Most seconds between two attempts, unless Retry-After asks for more."""
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


@dataclass(slots=True)
class Judge:
    """A coroutine function for the worker: it asks the endpoint and reads the score."""

    key: str
    config: JudgeConfig
    client: Any
    api_key: str
    spread: Callable[[], float] = random.random
    """A number from 0 to 1 that spreads the waits of several requests."""
    figures: Counter[str] = field(default_factory=Counter)
    is_async: bool = True
    whole_group: bool = False

    @classmethod
    def load(cls, key: str, spec: dict[str, Any]) -> Judge:
        """Return the judge. `key` is the section's name.

        Raise ConfigError if OpenAI's own endpoint has no key, and MissingDependency without openai.
        """
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise MissingDependency(
                f"{key}.model needs openai, which is not installed here. Fix: {INSTALL['openai']}."
            ) from None
        config = JudgeConfig.model_validate(spec)
        secret = os.environ.get(config.api_key_env, "").strip()
        if not (secret.isascii() and secret.isprintable()):
            rule = "the key in this environment variable has a line end, or another such character"
            fix = f"export {config.api_key_env}=... with the key alone"
            raise bad_value(f"{key}.api_key_env", config.api_key_env, rule, fix)
        if not secret and not config.base_url and "OPENAI_BASE_URL" not in os.environ:
            rule = "this environment variable has no key, and OpenAI's own endpoint needs one"
            fix = f"export {config.api_key_env}=..., or {key}.base_url of a local endpoint"
            raise bad_value(f"{key}.api_key_env", config.api_key_env, rule, fix)
        client = AsyncOpenAI(
            api_key=secret or "none",
            base_url=config.base_url or None,
            timeout=config.request_timeout_s,
            max_retries=0,  # the loop below counts retries and always obeys Retry-After
        )
        return cls(key, config, client, secret)

    async def run_async(self, call: Call) -> list[Score]:
        """Return the scores of a call's completions, one request for each. Raise RewardError."""
        return [await self._judge(message_of(self.config, call, text)) for text in call.completions]

    def take_figures(self) -> dict[str, float]:
        """Return the counts since the last call of this method."""
        taken = {name: float(count) for name, count in self.figures.items()}
        self.figures.clear()
        return taken

    async def _judge(self, message: str) -> Score:
        completion = await self._ask(message)
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

    async def _ask(self, message: str) -> _Completion:
        """Return the endpoint's answer. Try again after 429, 5xx, a time-out or a lost connection.

        Raise RewardError if the last attempt fails too, or at once after any other failure.
        """
        clock = asyncio.get_running_loop().time
        end, attempt = clock() + self.config.timeout_s, 0
        while True:
            try:
                return await self._request(message)
            except _TryAgain as failed:
                doubled = self.config.retry_wait_s * 2**attempt * (0.5 + self.spread() / 2)
                wait_s = max(failed.wait_s, min(doubled, _LONGEST_WAIT_S))
                if attempt == self.config.max_retries or clock() + wait_s >= end:
                    limits = f"{self.key}.max_retries and timeout_s allow no further attempt"
                    detail = f"{failed.detail}; {attempt} retries, and {limits}"
                    raise RewardError(failed.reason, detail) from None
            attempt += 1
            self.figures["retries"] += 1
            await asyncio.sleep(wait_s)

    async def _request(self, message: str) -> _Completion:
        import openai

        c = self.config
        fields: dict[str, Any] = {"temperature": c.temperature} if c.temperature is not None else {}
        fields |= {"max_tokens": c.max_tokens} if c.max_tokens else {}
        self.figures["requests"] += 1
        try:
            async with asyncio.timeout(c.request_timeout_s):  # httpx bounds each read alone
                raw = await self.client.chat.completions.with_raw_response.create(
                    model=c.model,
                    messages=[{"role": "user", "content": message}],
                    extra_body=c.extra_body,
                    **fields,
                )
            return _completions.decode(raw.http_response.content)
        except (openai.APITimeoutError, TimeoutError):
            limit = f"{self.key}.request_timeout_s = {c.request_timeout_s:g}"
            raise _TryAgain("timeout", f"the endpoint did not answer within {limit}") from None
        except openai.APIConnectionError as error:
            detail = f"no connection to the endpoint: {self._safe(error.__cause__ or error)}"
            raise _TryAgain("unreachable", detail) from None
        except openai.APIStatusError as error:
            detail = f"the endpoint answered {error.status_code}: {self._safe(error.message)}"
            reason = "rate_limited" if error.status_code == 429 else f"http_{error.status_code}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                wait_s = seconds_of(error.response.headers.get("retry-after", ""))
                raise _TryAgain(reason, detail, wait_s) from None
            raise RewardError(reason, detail) from None
        except msgspec.MsgspecError as error:
            text = self._safe(raw.http_response.text)
            detail = f"the endpoint's answer is no chat completion ({error}): {text}"
            raise RewardError("bad_answer", detail) from None

    def _safe(self, text: object) -> str:
        """Return the first 200 characters, without the API key."""
        safe = str(text).replace(self.api_key, "***") if self.api_key else str(text)
        return safe[:200]


class _TryAgain(Exception):
    """A failure that a later attempt may not have."""

    def __init__(self, reason: str, detail: str, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.wait_s = wait_s
        """The seconds that the endpoint asks to wait."""


def seconds_of(retry_after: str) -> float:
    """Return the seconds of a Retry-After header, which may also be a date."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
