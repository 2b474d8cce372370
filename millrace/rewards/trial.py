"""A trial of users' reward functions before a run: made-up answers and the truth, on real rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from millrace.errors import ConfigError, RewardError, WorkerError, bad_value
from millrace.rewards.builtin import BUILTIN
from millrace.rewards.functions import NOT_FOR_THE_TASK
from millrace.rewards.pool import RewardPool
from millrace.types import Completion, Prompt, Score, tokens_of

ROWS = 3
_MADE_UP = ("", "I do not know.", "so " * 400)
Encode = Callable[[str], Sequence[int]]
"""Returns the tokens of a text."""


async def try_functions(
    parts: Iterable[object],
    prompts: Sequence[Prompt],
    encode: Encode,
    note: Callable[[str], object],
) -> None:
    """Call each function of the user's, and `note` what is odd about its scores.

    Odd are equal scores of all answers, errors of some calls, and a score that depends on the
    other completions of the sample. Raise ConfigError if every call of a function fails.
    """
    pools = [p for p in parts if isinstance(p, RewardPool) and p.job.kind == "function"]
    chosen = [p for p in pools if p.job.spec.get("function", "") not in BUILTIN]
    for lines in await asyncio.gather(*(_try(pool, prompts, encode) for pool in chosen)):
        for line in lines:
            note(line)


def answers_to(truth: Any) -> list[str]:
    """Return made-up answers, and the truth in the forms that scorers look for."""
    first = truth[0] if isinstance(truth, list) and truth else truth
    if first is None or isinstance(first, dict):
        return [*_MADE_UP]
    tagged = f"<think>so</think>\n<answer>{first}</answer>"
    marked = f"#### {first}\n\\boxed{{{first}}}\nAnswer: {first}"
    return [*_MADE_UP, str(first), tagged, f"{tagged}\n{marked}"]


async def _try(pool: RewardPool, prompts: Sequence[Prompt], encode: Encode) -> list[str]:
    """Return the lines about one function."""
    key, function = f"{pool.job.key}.function", pool.job.spec["function"]
    scores: list[float] = []
    failed: list[tuple[str, RewardError]] = []
    beside = False
    for prompt in prompts:
        answers = answers_to(prompt.ground_truth)
        given = [Completion(answer, tokens=tokens_of(encode(answer))) for answer in answers]
        first = await _score(pool, prompt, given[:1])  # One that hangs costs one deadline.
        if isinstance(first, RewardError) and first.reason == "timeout" and not scores:
            raise _refused(key, function, answers[0], first)
        others = (_score(pool, prompt, [one]) for one in given[1:])
        found = alone = [first, *await asyncio.gather(*others)]
        if pool.whole_group:  # Such a function may need more than one answer.
            group = await _score(pool, prompt, given)
            found = [group] if isinstance(group, RewardError) else [[score] for score in group]
            pairs = zip(alone, found, strict=False)
            beside |= any(
                isinstance(a, list) and isinstance(b, list) and a[0].value != b[0].value
                for a, b in pairs
            )
        for answer, result in zip(answers, found, strict=False):
            if isinstance(result, list):
                scores.append(result[0].value)
            elif result.reason != NOT_FOR_THE_TASK or pool.job.key == "reward":
                failed.append((answer, result))
        if any(isinstance(r, RewardError) and r.reason == "timeout" for r in found):
            break  # Each further one would cost a deadline more.
    pool.figures.clear()
    name = f"{key} = {function!r}"
    if failed and not scores:
        raise _refused(key, function, *failed[0])
    lines = []
    if failed:
        answer, error = failed[0]
        lines.append(
            f"warning: {name}: {len(failed)} of {len(failed) + len(scores)} calls of a trial fail, "
            f"such as that for {answer!r:.60}: {error}. In the run, such samples are counted, and "
            "others take their places"
        )
    if len(scores) > 1 and len(set(scores)) == 1:
        lines.append(
            f"warning: {name} gives {scores[0]:g} for each of {len(scores)} answers of a trial, made "
            "up or true. Equal scores train nothing. Fix: look at the answers that it expects; "
            "reward.trial=false leaves the trial out"
        )
    if beside:
        lines.append(
            f"{name} scores an answer by the other answers to its prompt too: it gets all of a "
            "sample, where TRL and verl pass the whole batch"
        )
    return lines


async def _score(
    pool: RewardPool, prompt: Prompt, completions: Sequence[Completion]
) -> list[Score] | RewardError:
    """Return the scores of one call, or its failure."""
    try:
        return await pool.score(prompt, completions)
    except RewardError as error:
        return error
    except WorkerError as error:  # each worker of several in a row died, so the pool has failed
        key, function = f"{pool.job.key}.function", pool.job.spec["function"]
        died = RewardError("worker_died", str(error))
        raise _refused(key, function, completions[0].text, died) from None


def _refused(key: str, function: str, answer: str, error: RewardError) -> ConfigError:
    slow = error.reason == "timeout"  # then no further call is made
    calls = (
        "the first call of a trial fails, that"
        if slow
        else "every call of a trial fails, such as that"
    )
    rule = f"{calls} for the answer {answer!r:.60}: {error}"
    if error.trace:
        rule += f"\n{error.trace}\n"
    fix = "a function that scores any answer"
    if slow:
        fix = "a larger reward.timeout_s, or a faster function"
    fix += "; reward.trial=false leaves the trial out"
    return bad_value(key, function, rule, fix)
