"""Teachers outside of the trainer: log-probs of the tokens that the policy drew.

An OpenAI-compatible endpoint reads them as tokens of a prompt. vLLM gives their log-probs with
`prompt_logprobs`. Other servers give them with `echo` and `logprobs`, as OpenAI's did. A teacher with
processes of its own is a RewardPool whose workers hold a causal language model.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from millrace.config import TeacherConfig
from millrace.errors import RewardError, TeacherError, bad_value
from millrace.rewards.endpoint import Endpoint, client_of
from millrace.rewards.pool import RewardPool, model_job
from millrace.types import Author, Floats, Prompt, Thread, Tokens, Trajectory, floats_of

Form = Literal["prompt_logprobs", "echo"]
_FIELDS: dict[Form, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 0},
    "echo": {"echo": True, "logprobs": 1},
}
_FIGURES = dict.fromkeys(("requests", "retries", "tokens"), 0.0)
_LEAST = -9999.0
"""The log-prob with which vLLM writes minus infinity."""


class _LogProb(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _LogProb] | None] | None = None
    logprobs: _LogProbs | None = None


class _Completion(msgspec.Struct):
    """The fields of a completion that a teacher needs."""

    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_completions = msgspec.json.Decoder(_Completion)


Read = Callable[[Tokens], Awaitable[Sequence[float]]]
"""Returns log p of each token after those before it. The first one has none."""


async def read_trajectory(prompt: Prompt, trajectory: Trajectory, read: Read) -> Floats:
    """Return log p of each token of the policy, thread after thread."""

    async def of_thread(thread: Thread) -> Floats:
        tokens = (prompt.tokens if thread.opening is None else thread.opening)[:]
        drawn = list[int]()
        for segment in thread.segments:
            if segment.author is Author.POLICY:
                drawn += range(len(tokens), len(tokens) + len(segment.tokens))
            tokens += segment.tokens
        if not drawn:
            return floats_of()
        values = await read(tokens[: drawn[-1] + 1])  # nothing after the last one counts
        return floats_of(values[i] for i in drawn)

    whole = floats_of()
    for part in await asyncio.gather(*map(of_thread, trajectory.threads)):
        whole.extend(part)
    return whole


class _Counted:
    """The readings of a teacher: their time, their failures and what they counted."""

    figures: Counter[str]
    seconds: float
    """Seconds of all answers since `take_figures`."""

    async def log_probs(self, prompt: Prompt, trajectory: Trajectory) -> Floats:
        return await read_trajectory(prompt, trajectory, self._read)

    async def _read(self, tokens: Tokens) -> Sequence[float]:
        """Return log p of each token after those before it. The first one has none."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        try:
            return await self._answer(tokens)
        except TeacherError as error:
            self.figures.update(("failures", f"failures/{error.reason}"))
            raise
        finally:
            self.seconds += clock() - begin

    async def _answer(self, tokens: Tokens) -> Sequence[float]:
        raise NotImplementedError

    async def _read_longest(self, prompt: Prompt, longest: int) -> TeacherError | None:
        """Read as many tokens as a trajectory may have. Return the failure, if it fails."""
        many = (prompt.tokens * -(-longest // len(prompt.tokens)))[:longest]
        try:
            await self._read(many)
        except TeacherError as error:
            return error
        return None

    def take_figures(self) -> dict[str, float]:
        """Return the counts and the seconds since the last call of this method."""
        taken = _FIGURES | {name: float(count) for name, count in self.figures.items()}
        taken["seconds"], self.seconds = self.seconds, 0.0
        self.figures.clear()
        return taken


class OwnTeacher(_Counted):
    """A teacher in processes of its own. Satisfies ports.Teacher."""

    def __init__(
        self,
        key: str,
        config: TeacherConfig,
        temperature: float,
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """`key` is the section's name. `environments` has variables for each worker."""
        job = model_job("teacher", key, config)
        job.spec["temperature"] = temperature
        self.key, self.config = key, config
        self.pool = RewardPool(job, key, environments)
        self.figures = Counter()
        self.seconds = 0.0

    async def start(self) -> None:
        """Start the workers. Raises what RewardPool.start raises."""
        await self.pool.start()

    async def close(self) -> None:
        await self.pool.close()

    async def _answer(self, tokens: Tokens) -> Floats:
        self.figures["requests"] += 1
        try:
            found = await self.pool.read(tokens)
        except RewardError as error:
            detail = str(error).removeprefix(f"{error.reason}: ")
            raise TeacherError(error.reason, detail, error.trace) from error
        self.figures["tokens"] += len(tokens)
        return found

    async def check(self, prompt: Prompt, longest: int, ids: Callable[[str], list[int]]) -> bool:
        """Read `longest` tokens. Raise ConfigError on failure. Tokenizers are compared before."""
        if error := await self._read_longest(prompt, longest):
            rule = f"it reads no {longest:,} tokens, which a trajectory may have: {error}"
            raise bad_value(f"{self.key}.path", self.config.path, rule, "another device")
        return True


@dataclass
class ServedTeacher(_Counted, Endpoint[TeacherConfig]):
    """Satisfies ports.Teacher."""

    error: ClassVar[type[TeacherError]] = TeacherError
    form: Form = "prompt_logprobs"
    """The fields that ask for the log-probs. `check` finds them."""
    seconds: float = 0.0
    room: asyncio.Semaphore = field(default_factory=asyncio.Semaphore)

    @classmethod
    def load(cls, key: str, config: TeacherConfig) -> ServedTeacher:
        """Return the teacher. `key` is its section's name. Raises what `client_of` raises."""
        room = asyncio.Semaphore(config.max_concurrency)
        return cls(key, config, *client_of(key, config), room=room)

    async def close(self) -> None:
        await self.client.close()

    async def start(self) -> None:
        """Do nothing: the server runs."""

    async def _read(self, tokens: Tokens) -> Sequence[float]:
        async with self.room:
            return await super()._read(tokens)

    async def _answer(self, tokens: Tokens) -> Sequence[float]:
        completion = await self.ask(
            lambda: self.client.completions.with_raw_response.create(
                model=self.config.model,
                prompt=list(tokens),
                max_tokens=1,  # vLLM always draws one
                temperature=0,
                extra_body=_FIELDS[self.form],
            ),
            _completions,
        )
        self.figures["tokens"] += len(tokens)
        return self._values(completion, tokens)

    def _values(self, completion: _Completion, tokens: Sequence[int]) -> list[float]:
        choice = completion.choices[0] if completion.choices else _Choice()
        if self.form == "echo":
            given = choice.logprobs.token_logprobs if choice.logprobs else []
        else:
            pairs = zip(choice.prompt_logprobs or (), tokens, strict=False)
            found = (None if one is None else one.get(str(token)) for one, token in pairs)
            given = [None if one is None else one.logprob for one in found]
        values = given[1 : len(tokens)]
        if len(values) < len(tokens) - 1 or any(v is None or math.isnan(v) for v in values):
            detail = "the endpoint's answer lacks the log-prob of a token of the prompt"
            raise TeacherError("no_log_probs", detail)
        kept = (v for v in values if v is not None)
        return [0.0, *(-math.inf if v <= _LEAST else v for v in kept)]

    # -- checks

    async def check(self, prompt: Prompt, longest: int, ids: Callable[[str], list[int]]) -> bool:
        """Ask for the log-probs of a prompt, and of `longest` tokens. Raise ConfigError on failure.

        `ids` is the policy's tokenizer. Return whether the endpoint's own one was compared with it.
        """
        try:
            await self._find_form(prompt.tokens[:] if len(prompt.tokens) > 1 else prompt.tokens * 2)
        except TeacherError as error:
            raise await self._refusal(error) from None
        if late := await self._read_longest(prompt, longest):
            rule = (
                f"it gives no log-probs of {longest:,} tokens, which a trajectory may have: {late}"
            )
            fix = f"a server with room for {longest + 1:,} tokens, or shorter lengths in rollout"
            raise bad_value(f"{self.key}.model", self.config.model, rule, fix)
        theirs = await self._tokenized(prompt.text)
        if theirs is not None and theirs != (own := ids(prompt.text)):
            pairs = enumerate(zip(theirs, own, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(own)))
            rule = (
                f"its tokenizer reads the first prompt as {theirs[at : at + 4]} from token {at} on"
            )
            rule += f", and the policy's as {own[at : at + 4]}"
            fix = "a teacher with the policy's tokenizer"
            raise bad_value(f"{self.key}.model", self.config.model, rule, fix)
        return theirs is not None

    async def _find_form(self, tokens: Tokens) -> None:
        """Set `form`. Raise TeacherError if the endpoint knows none."""
        try:
            await self._read(tokens)
        except TeacherError as first:
            if first.reason not in ("http_400", "http_422", "no_log_probs", "bad_answer"):
                raise
            self.form = "echo"
            try:
                await self._read(tokens)
            except TeacherError:
                raise first from None

    async def _refusal(self, error: TeacherError) -> Exception:
        key, model, url = self.key, self.config.model, self.config.base_url
        if error.reason == "no_log_probs" or error.reason in ("http_400", "http_422", "bad_answer"):
            rule = f"gives no log-probs of a prompt's tokens: {error}"
            fix = "a server that does, such as `vllm serve MODEL`"
            return bad_value(f"{key}.base_url", url, rule, fix)
        if error.reason == "http_404":
            models = await self._optional("get", "/models", msgspec.json.Decoder(_Models))
            if models is None:
                rule, fix = f"{error}", f"{key}.base_url=http://HOST:PORT/v1"
                return bad_value(f"{key}.base_url", url, rule, fix)
            names = [one.id for one in models.data]
            if model not in names:
                rule = f"{url} serves no such model: {error}"
                fix = " or ".join(f"{key}.model={name}" for name in names)
                return bad_value(f"{key}.model", model, rule, fix or "a server with a model")
        fix = "start the server, or correct the address"
        if error.reason in ("http_401", "http_403"):
            fix = f"export {self.config.api_key_env}=... with the key of this endpoint"
        return bad_value(f"{key}.base_url", url, str(error), fix)

    async def _tokenized(self, text: str) -> list[int] | None:
        """Return the ids of a text by vLLM's /tokenize. None if the endpoint has none."""
        url = f"{self.config.base_url.rstrip('/').removesuffix('/v1')}/tokenize"
        body = {"model": self.config.model, "prompt": text, "add_special_tokens": False}
        found = await self._optional("post", url, msgspec.json.Decoder(_Tokenized), body=body)
        return None if found is None else found.tokens

    async def _optional(self, method: str, path: str, answer: Any, **options: Any) -> Any:
        """Return the answer of a route that a server need not have, or None."""
        import httpx
        import openai

        try:
            send = getattr(self.client, method)
            return answer.decode((await send(path, cast_to=httpx.Response, **options)).content)
        except (openai.OpenAIError, msgspec.MsgspecError):
            return None
