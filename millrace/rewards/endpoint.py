"""A client of an OpenAI-compatible endpoint: its retries, its counts, and its secret.

The API key comes from the environment alone. No error shows it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from millrace.config.endpoint_keys import EndpointConfig
from millrace.errors import INSTALL, MissingDependency, RewardError, SampleError, bad_value

_LONGEST_WAIT_S = 60.0
"""Most seconds between two attempts, unless Retry-After asks for more."""
C = TypeVar("C", bound=EndpointConfig)
T = TypeVar("T")


def client_of(key: str, config: EndpointConfig) -> tuple[Any, str]:
    """Return openai's client, and the secret that it sends. `key` is the section's name.

    Raise ConfigError if OpenAI's own endpoint has no key, and MissingDependency without openai.
    """
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise MissingDependency(
            f"{key}.model needs openai, which is not installed here. Fix: {INSTALL['openai']}."
        ) from None
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
        max_retries=0,  # `ask` counts retries and always obeys Retry-After
    )
    return client, secret


@dataclass
class Endpoint(Generic[C]):
    """The requests to one endpoint."""

    error: ClassVar[type[SampleError]] = RewardError
    """Raised by `ask`, with a reason."""
    key: str
    config: C
    client: Any
    api_key: str
    spread: Callable[[], float] = random.random
    """A number from 0 to 1 that spreads the waits of several requests."""
    figures: Counter[str] = field(default_factory=Counter)

    def take_figures(self) -> dict[str, float]:
        """Return the counts since the last call of this method."""
        taken = {name: float(count) for name, count in self.figures.items()}
        self.figures.clear()
        return taken

    async def ask(self, send: Callable[[], Awaitable[Any]], answer: msgspec.json.Decoder[T]) -> T:
        """Return the answer to a request. Try again after 429, 5xx, a time-out or a lost connection.

        Raise `error` if the last attempt fails too, or at once after any other failure.
        """
        clock = asyncio.get_running_loop().time
        end, attempt = clock() + self.config.timeout_s, 0
        while True:
            try:
                return await self._request(send, answer)
            except _TryAgain as failed:
                doubled = self.config.retry_wait_s * 2**attempt * (0.5 + self.spread() / 2)
                wait_s = max(failed.wait_s, min(doubled, _LONGEST_WAIT_S))
                if attempt == self.config.max_retries or clock() + wait_s >= end:
                    limits = f"{self.key}.max_retries and timeout_s allow no further attempt"
                    detail = f"{failed.detail}; {attempt} retries, and {limits}"
                    raise self.error(failed.reason, detail) from None
            attempt += 1
            self.figures["retries"] += 1
            await asyncio.sleep(wait_s)

    async def _request(
        self, send: Callable[[], Awaitable[Any]], answer: msgspec.json.Decoder[T]
    ) -> T:
        import openai

        self.figures["requests"] += 1
        try:
            async with asyncio.timeout(
                self.config.request_timeout_s
            ):  # httpx bounds each read alone
                raw = await send()
            return answer.decode(raw.http_response.content)
        except (openai.APITimeoutError, TimeoutError):
            limit = f"{self.key}.request_timeout_s = {self.config.request_timeout_s:g}"
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
            raise self.error(reason, detail) from None
        except msgspec.MsgspecError as error:
            text = self._safe(raw.http_response.text)
            detail = f"the endpoint's answer cannot be read ({error}): {text}"
            raise self.error("bad_answer", detail) from None

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
