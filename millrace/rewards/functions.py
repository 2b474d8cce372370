"""Reward functions of users: the import by path or module, the call, and the check of the result.

    verl   f(data_source, solution_str, ground_truth, extra_info, **kwargs)
           returns a number, or a dict with "score"
    batch  f(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)
           is verl's too, and returns a list of such results
    TRL    f(prompts, completions, completion_ids, log_metric, **columns)
           returns a list of numbers

The name of the completion's parameter decides: `solution_str`, `solution_strs`, or `completions` or
`completion_ids`. All may be `async def`. A function that takes lists gets all completions of a
sample in one call. With the attribute `whole_group = False`, it gets each completion as soon as it
is finished.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, SupportsFloat

from millrace.codec import sendable
from millrace.data import user_code
from millrace.data.spec import nearest
from millrace.errors import RewardError, bad_value
from millrace.rewards.answers import extract
from millrace.rewards.builtin import BUILTIN
from millrace.rewards.verl_names import MODULES
from millrace.rewards.wire import Call
from millrace.types import Message, Score

NOT_FOR_THE_TASK = "not_for_the_task"
"""The reason of a TRL function that returns None: another reward of the mix scores the task."""
_KEY = "reward.function"
_TEXTS = str | bytes | bytearray | memoryview
_NO_NUMBERS = tuple("USOcmM")
"""NumPy's kinds of text, objects, complex numbers and times. float() accepts some of them."""
_LARGEST = 1e15
"""The square of a larger score, as in a standard deviation, is close to float32's limit."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_COMPLETIONS = frozenset({"completions", "completion_ids"})
_TRL = _COMPLETIONS | {"prompts", "log_metric", "data_source", "ground_truth", "extra_info"}
"""The arguments that TRL's form has for any row."""
_BATCH = tuple(f"{name}s" for name in _VERL)
_LACKING = {
    "trainer_state": "versions train while rewards run, so no state of a trainer belongs to a call",
    "log_extra": "RUN/samples has the responses, and the further numbers of a dict are components",
    "environments": "an environment of millrace gives its own rewards",
}
"""Arguments that TRL passes and millrace does not, with the reasons."""


@dataclass(frozen=True, slots=True)
class Function:
    """A reward function and how to call it."""

    call: Callable[..., Any]
    style: Literal["verl", "batch", "trl"]
    is_async: bool
    wanted: frozenset[str] | None
    """The names of the function's parameters. None means that it takes all."""
    whole_group: bool = False
    """Whether the function gets all completions of a sample in one call."""
    names_answers: bool = False
    """Whether a score without `pred` means that the whole response is the answer."""
    required: frozenset[str] = frozenset()
    """The names of the parameters without a default."""
    figures: Counter[str] = field(default_factory=Counter)
    """Counts since the last reply: components that were no numbers, by name."""
    notes: list[str] = field(default_factory=list)
    """Lines on the function, for the user."""

    @property
    def takes_tokens(self) -> bool:
        """Whether the function takes the tokens of completions."""
        return self.style == "trl" and (self.wanted is None or "completion_ids" in self.wanted)

    @property
    def columns(self) -> list[str]:
        """The columns of a row that the function cannot do without."""
        return sorted(self.required - _TRL) if self.style == "trl" else []

    def run(self, call: Call) -> list[Score]:
        """Return a synchronous function's scores. Raise RewardError or the function's error."""
        metrics: dict[str, Any] = {}
        results = [self.call(**given) for given in self._arguments(call, metrics)]
        return self._scores(results, call, metrics)

    async def run_async(self, call: Call) -> list[Score]:
        """Return a coroutine function's scores. Raise RewardError or the function's own error."""
        metrics: dict[str, Any] = {}
        results = [await self.call(**given) for given in self._arguments(call, metrics)]
        return self._scores(results, call, metrics)

    def _score(self, value: Any, text: str) -> Score:
        """Return the score of one response, with the answer that the response gives."""
        score = to_score(value)
        if isinstance(value, dict):
            others = {sendable(str(k)) for k, v in value.items() if isinstance(v, SupportsFloat)}
            self.figures.update(f"no_number/{k}" for k in others - {"score", "pred", *score.extra})
        if self.names_answers or score.answer is not None:
            return score
        return replace(score, answer=extract(text, "any"))

    def _scores(self, values: Any, call: Call, metrics: Mapping[str, Any]) -> list[Score]:
        """Return the results as Scores. Metrics of the call are components of all of them."""
        if self.style != "verl":
            values = _listed(values[0], len(call.completions))
        scores = [self._score(v, text) for v, text in zip(values, call.completions, strict=True)]
        if not metrics:
            return scores
        shared = {}
        for name, value in ((sendable(str(k)), v) for k, v in metrics.items()):
            try:
                shared[name] = _number(value, f"log_metric of {name}")
            except RewardError as error:  # as the NaN of a component
                if error.reason != "not_finite":
                    raise
                self.figures[f"no_number/{name}"] += 1
        return [replace(score, extra=shared | score.extra) for score in scores]

    def take_figures(self) -> dict[str, float]:
        """Return the figures since the last call of this method."""
        if not self.figures:
            return {}
        taken = {name: float(count) for name, count in self.figures.items()}
        self.figures.clear()
        return taken

    def _arguments(self, call: Call, metrics: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the arguments of each call of the function. In lists, one call takes all.

        `metrics` takes what a TRL function logs by `log_metric`.
        """
        source, truth, info = call.data_source, call.ground_truth, call.extra_info
        rows = [(source, text, truth, info) for text in call.completions]
        if self.style == "verl":
            calls = [dict(zip(_VERL, row, strict=True)) for row in rows]
        elif self.style == "batch":
            calls = [dict(zip(_BATCH, map(list, zip(*rows, strict=True)), strict=True))]
        else:
            calls = [self._columns(call, metrics)]
        if self.wanted is None:
            return calls
        return [{k: v for k, v in one.items() if k in self.wanted} for one in calls]

    def _columns(self, call: Call, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the lists for a TRL function, with one entry for each completion.

        If the prompt is messages, its completions are messages too.
        """
        n, messages = len(call.completions), call.columns.get("prompt")
        row = call.extra_info | {"data_source": call.data_source, "ground_truth": call.ground_truth}
        row |= {"extra_info": call.extra_info} | call.columns
        columns: dict[str, Any] = {k: [v] * n for k, v in row.items() if k != "prompt"}
        columns["prompts"] = [call.prompt if messages is None else messages] * n
        columns["completions"] = list(call.completions)
        if call.messages:  # TRL's conversation begins after the prompt's messages
            columns["completions"] = [_after_prompt(each, messages) for each in call.messages]
        elif messages is not None:
            columns["completions"] = [
                [{"role": "assistant", "content": text}] for text in call.completions
            ]
        if self.takes_tokens:
            columns["completion_ids"] = call.completion_ids
        columns["log_metric"] = metrics.__setitem__
        if missing := sorted(self.required - columns.keys()):
            have = ", ".join(sorted(columns))
            raise RewardError(
                "no_column",
                f"the function takes {', '.join(missing)}, and the row has no such column. It has "
                f"{have}",
            )
        return columns


def _listed(values: Any, n: int) -> Sequence[Any]:
    """Return the results of a function that takes lists. Raise RewardError if they are not `n`."""
    if hasattr(values, "tolist") and not isinstance(values, _TEXTS):  # an array or a tensor
        values = values.tolist()
    if isinstance(values, Iterator):
        values = list(values)
    if isinstance(values, _TEXTS | dict) or not isinstance(values, Sequence):
        kind = type(values).__name__
        detail = f"returned a {kind}; return a list with a number for each completion"
        raise RewardError("not_a_list", detail)
    if len(values) != n:
        raise RewardError("wrong_length", f"returned {len(values)} scores for {n} completions")
    if values and all(value is None for value in values):
        raise RewardError(NOT_FOR_THE_TASK, "returned None for every completion of the sample")
    return values


def _after_prompt(messages: Sequence[Message], prompt: Any) -> list[Message]:
    """Return the messages that follow those of the prompt, if they begin with them."""
    first = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), 0)
    length = len(prompt) if isinstance(prompt, list) else first
    return list(messages[length if list(messages[:length]) == prompt else first :])


def check_name(spec: str, key: str = _KEY) -> None:
    """Raise ConfigError if `spec` names neither a built-in function nor a file that exists.

    This imports nothing, so a module and the name in a file may still be missing.
    """
    if spec in BUILTIN:
        return
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        known = sorted(filter(None, BUILTIN))
        is_file = spec.rstrip(":").endswith(".py")
        fix = f"{spec.rstrip(':')}:NAME of the function" if is_file else nearest(spec, known)
        rule = f"must be path.py:name, module:name, or one of {', '.join(known)}"
        raise bad_value(key, spec, rule, fix)
    user_code.check_name(key, spec)


def load_function(spec: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> Function:
    """Return the function that `reward.function` names: built-in, `path.py:name` or `module:name`.

    `options` has the options of the built-in functions that have some, by their names. This imports
    the user's code. Raise ConfigError if there is no such file, module or name, if the import
    fails, or if the signature is neither verl's nor TRL's.
    """
    check_name(spec)
    if spec in BUILTIN:
        call = partial(BUILTIN[spec], **(options or {}).get(spec, {}))
        return Function(call, "verl", is_async=False, wanted=None, names_answers=True)
    if not user_code.is_in_driver(spec):  # the driver's imports find what is installed
        user_code.stand_in(MODULES)
    return _function(spec, user_code.load(_KEY, spec))


def _function(spec: str, function: Callable[..., Any]) -> Function:
    if isinstance(function, type):
        fix = f"an instance: `reward = {function.__name__}(...)` in the file, and its name here"
        raise bad_value(_KEY, spec, "is a class, so a call of it makes an object", fix)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions that are written in C
        raise bad_value(
            _KEY, spec, "has no signature that can be read", "a Python function around it"
        ) from None
    names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    required = {
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    forms = (
        "f(data_source, solution_str, ground_truth, extra_info) or "
        "f(prompts, completions, **columns)"
    )
    style: Literal["verl", "batch", "trl"] = "trl" if names & _COMPLETIONS else "verl"
    if style == "verl" and "solution_strs" in names:
        style = "batch"
    if style == "verl" and "solution_str" not in names:
        taken = ", ".join(p.name for p in parameters)
        rule = f"takes ({taken}), without solution_str (verl) or completions (TRL)"
        raise bad_value(_KEY, spec, rule, f"the signature {forms}")
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise bad_value(
            _KEY, spec, "has parameters that cannot be passed by name", f"the signature {forms}"
        )
    if style != "trl" and (lacking := sorted(required - {*(_VERL if style == "verl" else _BATCH)})):
        rule = f"needs {', '.join(lacking)}, which verl's signature lacks"
        raise bad_value(_KEY, spec, rule, "give them defaults")
    if style == "trl" and (lacking := sorted(required & _LACKING.keys())):
        rule = f"needs {lacking[0]}, which millrace does not pass: {_LACKING[lacking[0]]}"
        raise bad_value(_KEY, spec, rule, f"give {lacking[0]} a default, or delete it")
    whole_group = bool(getattr(function, "whole_group", style != "verl"))
    if style == "verl" and whole_group:
        rule = "asks for whole groups (whole_group = True), but takes one solution_str"
        raise bad_value(_KEY, spec, rule, "the signature f(prompts, completions, **columns)")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        vars(type(function)).get("__call__")
    )
    wanted = None if takes_all else frozenset(names)
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    asked = [name for name in _LACKING if name in names or name in constants]
    notes = [f"{_KEY} = {spec!r}: {name} is not passed: {_LACKING[name]}" for name in asked]
    return Function(
        function,
        style,
        is_async,
        wanted,
        whole_group,
        required=frozenset(required),
        notes=notes if style == "trl" else [],
    )


def to_score(value: Any) -> Score:
    """Return a function's result as a Score.

    The result is a finite number, or a dict with "score". Its "pred" is the answer, and its other
    finite numbers become extra. Raise RewardError for everything else, such as None, NaN, infinities and
    strings.
    """
    if not isinstance(value, dict):
        return Score(_number(value, "the score"))
    if "score" not in value:
        raise RewardError(
            "no_score", f'a dict without "score": it has {", ".join(map(str, value)) or "nothing"}'
        )
    rest = {sendable(str(k)): v for k, v in value.items() if k not in ("score", "pred")}
    extra = {}
    for name, component in rest.items():
        with suppress(RewardError):
            if isinstance(component, SupportsFloat):
                extra[name] = _number(component, name)
    score = Score(_number(value["score"], "the score"), extra)
    if "pred" not in value:
        return score
    return replace(score, answer="" if value["pred"] is None else sendable(str(value["pred"])))


def _number(value: Any, what: str) -> float:
    if type(value) is float and abs(value) <= _LARGEST:
        return value  # The checks of a protocol take longer than most functions.
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if not isinstance(value, SupportsFloat) or isinstance(value, _TEXTS) or kind in _NO_NUMBERS:
        raise RewardError(
            "not_a_number", f"{what} is {value!r:.80}, a {type(value).__name__}; return a number"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        given = f"{value!r:.80}, a {type(value).__name__}"
        raise RewardError("not_a_number", f"{what} is {given}: {error}; return a number") from error
    if not math.isfinite(number):
        raise RewardError("not_finite", f"{what} is {number}; return a finite number")
    if abs(number) > _LARGEST:
        rule = f"training computes in float32, so return a number up to {_LARGEST:g}"
        raise RewardError("too_large", f"{what} is {number:g}; {rule}")
    return number
