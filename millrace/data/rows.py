"""Rows in verl's, TRL's and reasoning-gym's columns, as one Problem.

prompt        `data.prompt_key`: a string, or messages [{role, content}]; else `question`
data_source   the column, else the source's name
ground_truth  `reward_model.ground_truth`, else `ground_truth`, `answer` or `solution`
answer        `answer` or `solution`, else the ground truth: the text of a demonstration
extra_info    the column, with reasoning-gym's `metadata`
columns       all other columns, for reward functions in TRL's signature, and a prompt of messages
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from millrace.data.row_store import Row, hook
from millrace.data.sources import Rows
from millrace.data.spec import nearest
from millrace.errors import bad_row

Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios", "multi_modal_data")
"""The columns of TRL and verl with the parts of a prompt that are no text."""
_KINDS = ("image", "video", "audio")
_FILE = re.compile(r"^data:|\.(?:png|jpe?g|gif|webp|bmp|mp4|avi|mov|webm|wav|mp3|flac)$", re.I)
_TAKEN = {"data_source", "reward_model", "extra_info", "metadata"}
_PLACED = re.compile(r"^\s*<(image|video|audio)>|<(image|video|audio)>\s*$", re.MULTILINE)
"""A mark at an end of a line. Inside a line it may be words on a tag."""
_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Problem:
    """One checked row in plain JSON types. Checkpoints and process boundaries do not change it."""

    prompt: Messages | str
    data_source: str
    ground_truth: Any = None
    answer: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of the prompt, without a chat template."""
        return (
            self.prompt
            if isinstance(self.prompt, str)
            else "\n".join(m["content"] for m in self.prompt)
        )


def problem(
    rows: Rows, i: int, *, prompt_key: str = "prompt", need_ground_truth: bool = False
) -> Problem:
    """Return row i as a Problem. Raise DataError with file, row, value, rule and fix."""
    part, at = rows.locate(i)
    row, where = {k: _known(v) for k, v in part.get(at).items()}, rows.describe(i)
    used, prompt = _prompt(where, row, prompt_key)
    _no_media(where, {k: v for k, v in row.items() if k != used}, prompt)
    source = row.get("data_source") or part.name
    if not isinstance(source, str):
        raise bad_row(
            f"{where}, data_source", source, "must be a string", "the name of the data set"
        )
    _checked(f"{where}, data_source", source)
    extra = dict(_struct(where, row, "extra_info"))
    if "metadata" in row:
        extra.setdefault("metadata", row["metadata"])
    truth = _ground_truth(where, row)
    missing = truth is None or truth == [] or (isinstance(truth, str) and not truth.strip())
    if missing and need_ground_truth and "reasoning_gym" not in extra:
        rule = "no ground truth: reward_model.ground_truth, ground_truth, answer and solution are missing, null, NaN or empty"
        raise bad_row(
            where, sorted(row), rule, "add one of these columns, or reward.function=FILE.py:NAME"
        )
    if isinstance(truth, dict) and need_ground_truth and "reasoning_gym" not in extra:
        rule = "is an object, and the built-in scorers compare a text, a number or a list of them"
        fix = "its value alone, or reward.function=FILE.py:NAME, which gets the object"
        raise bad_row(f"{where}, ground truth", truth, rule, fix)
    answer = next(
        (
            _checked(f"{where}, {c}", row[c], required=False)
            for c in ("answer", "solution")
            if isinstance(row.get(c), str)
        ),
        None,
    )
    plain_truth = _plain(f"{where}, ground truth", truth)
    columns = {k: v for k, v in row.items() if k not in _TAKEN and k != used}
    if not isinstance(prompt, str):
        columns["prompt"] = prompt
    return Problem(
        prompt=prompt,
        data_source=source,
        ground_truth=plain_truth,
        answer=answer if answer is not None else "" if truth is None else _text(truth),
        extra_info=_plain(f"{where}, extra_info", extra),
        columns={k: _plain(f"{where}, {k}", v) for k, v in columns.items()},
    )


Refusal = Callable[[str, dict[str, Any]], tuple[str, str] | None]
"""A check of a row's data_source and extra_info. It returns (rule, fix), or None for a good row."""


@dataclass(frozen=True, slots=True)
class RowCheck:
    """The check of a row, without a tokenizer."""

    prompt_key: str = "prompt"
    need_ground_truth: bool = False
    refusal: Refusal | None = None
    inspect: Callable[[Problem, str], None] | None = None
    """Gets each row and the words that name it. It raises DataError for a bad one."""
    key: str = ""
    """The name of all that decides an outcome. It is empty if nobody may keep one."""

    def __call__(self, rows: Rows, i: int) -> Problem:
        """Return row i as a Problem. Raise DataError for a bad row."""
        entry = problem(
            rows, i, prompt_key=self.prompt_key, need_ground_truth=self.need_ground_truth
        )
        reason = None
        if self.refusal is not None:
            reason = self.refusal(entry.data_source, entry.extra_info)
        if reason is not None:
            row, where = rows[i], f"{rows.describe(i)}, data_source"
            named = "" if row.get("data_source") else " (no such column: the source's name)"
            raise bad_row(f"{where}{named}", entry.data_source, *reason)
        if self.inspect is not None:
            self.inspect(entry, rows.describe(i))
        return entry


def check_rows(rows: Rows, check: RowCheck, most: int | None = None) -> None:
    """Raise DataError for the first bad row of the first `most` distinct ones.

    Of a generated source, check only the first row.
    """
    for i in islice(rows.distinct(generated=1), most):
        check(rows, i)


def texts(rows: Rows, *, prompt_key: str = "prompt", limit: int = 2000) -> Iterator[str]:
    """Yield the texts from which a tokenizer is built.

    They are the prompts and answers of all rows of files and of about `limit` rows of each
    generated source, and the alphabets of tasks.
    """
    at = 0
    for part, end in zip(rows.parts, rows.ends, strict=True):
        if part.task is not None:
            yield part.task.alphabet()
        step = max(1, part.size // limit) if part.generated else 1
        for i in range(at, end, step):
            row = problem(rows, i, prompt_key=prompt_key)
            yield row.text
            yield row.answer
        at = end


def plain(value: Any) -> Any:
    """Return `value` in JSON's types, as after a checkpoint. Tuples become lists.

    numpy's types become Python's types.
    """
    if value is None or type(value) in (str, float, bool):
        return value
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=hook))


def _plain(where: str, value: Any) -> Any:
    try:
        return plain(_checked(where, value, required=False) if isinstance(value, str) else value)
    except (ValueError, TypeError, RecursionError) as error:
        rule = f"cannot be written as JSON: {error}"
        raise bad_row(
            where, value, rule, "text, numbers, lists and objects; or delete the column"
        ) from None


def _prompt(where: str, row: Row, key: str) -> tuple[str, Messages | str]:
    """Return (column, prompt)."""
    if key not in row and key == "prompt" and "question" in row:
        key = "question"
    if key not in row:
        rule = f"has no column {key!r}"
        usual = next((name for name in ("prompt", "question") if name in row), "")
        near = usual or nearest(key, row).replace("one of", "NAME, one of")
        fix = f"data.prompt_key={near}"
        raise bad_row(where, sorted(row), rule, f"{fix}, or add the column")
    prompt, where = row[key], f"{where}, {key}"
    if isinstance(prompt, str):
        return key, _checked(where, prompt)
    if prompt is None:
        raise bad_row(
            where, prompt, "is null", "a string, or messages [{role, content}]; or delete the row"
        )
    if not isinstance(prompt, list) or not all(isinstance(m, dict) for m in prompt):
        raise bad_row(
            where, prompt, "must be a string, or messages [{role, content}]", "one of these forms"
        )
    if not prompt:
        raise bad_row(
            where, prompt, "has no message", "at least one message of the user; or delete the row"
        )
    messages = [_message(f"{where}[{n}]", message) for n, message in enumerate(prompt)]
    last = messages[-1]
    if last["role"] == "assistant" and not last["content"].strip() and "tool_calls" not in last:
        rule = "is empty, so there are no words of the assistant to continue"
        fix = "delete the message: the policy writes the next one"
        raise bad_row(f"{where}[{len(messages) - 1}].content", last["content"], rule, fix)
    return key, messages


def _message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        fix = nearest(str(role), ROLES)
        if {"from", "value"} <= message.keys():  # ShareGPT's names
            fix = "role and content in place of from and value, with user for human, assistant for gpt"
        raise bad_row(f"{where}.role", role, f"must be one of {', '.join(ROLES)}", fix)
    if content is None and message.get("tool_calls"):
        content = ""  # as OpenAI's API writes a message that only calls tools
    if not isinstance(content, str):
        raise bad_row(
            f"{where}.content",
            content,
            "must be a string",
            "text; images and other parts are not supported",
        )
    _checked(f"{where}.content", content, required=role == "user")
    return {k: v for k, v in (message | {"content": content}).items() if v is not None}


def _checked(where: str, text: str, required: bool = True) -> str:
    if required and not text.strip():
        raise bad_row(where, text, "is empty", "a problem in words; or delete the row")
    match = _UNWRITABLE.search(text)
    if match:
        kind = "a NUL" if match[0] == "\x00" else "half of a surrogate pair"
        around = text[max(0, match.start() - 20) : match.end() + 20]
        raise bad_row(
            where, around, f"has {kind} at character {match.start()}", "delete the character"
        )
    return text


def _known(value: Any) -> Any:
    """Return None for NaN, which a data frame writes for a missing value."""
    return None if isinstance(value, float) and value != value else value


def _no_media(where: str, row: Row, prompt: Messages | str) -> None:
    """Raise DataError if a column or a mark in the prompt stands for a part that is no text."""
    text = prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)
    marked = {kind for kind in _KINDS if f"<{kind}>" in text}
    kind = (found[1] or found[2]) if (found := _PLACED.search(text)) else ""
    if kind and f"</{kind}>" not in text and not any(name.startswith(kind) for name in row):
        rule = f"stands for {kind}, and prompts are text, so the policy would read the mark"
        raise bad_row(f"{where}, prompt", f"<{kind}>", rule, "delete the mark, or the row")
    if row.get("chat_template_kwargs"):
        rule = "a row has no arguments of the chat template, so the policy would not see them"
        fix = "a chat template in the model folder that sets them, or no such column"
        raise bad_row(f"{where}, chat_template_kwargs", row["chat_template_kwargs"], rule, fix)
    for name, value in row.items():
        # Other columns may have such a name, such as `image_width`. A mark in the prompt decides.
        about = name in _MEDIA
        if marked and not about and any(name.startswith(kind) for kind in marked):
            # The mark may be a tag of HTML, and the column words on it, such as `image_hint`.
            about = not (isinstance(value, str) and len(value.split()) > 1)
        if name.startswith(_KINDS) and isinstance(value, str | list) and value:
            about = about or bool(_FILE.search(str(value[0] if isinstance(value, list) else value)))
        if about and isinstance(value, list | dict | bytes | str) and value:
            rule = "prompts are text, so the policy would not see it"
            raise bad_row(f"{where}, {name}", value, rule, "delete the column, or the row")


def _struct(where: str, row: Row, column: str) -> dict[str, Any]:
    value = row.get(column)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_row(
            f"{where}, {column}",
            value,
            "must be an object",
            "a struct of named values, or leave the column out",
        )
    return value


def _ground_truth(where: str, row: Row) -> Any:
    truth = _known(_struct(where, row, "reward_model").get("ground_truth"))
    for column in ("ground_truth", "answer", "solution"):
        truth = row.get(column) if truth is None else truth
    if isinstance(truth, str):
        _checked(f"{where}, ground truth", truth, required=False)
    return truth


def _text(truth: Any) -> str:
    return (
        truth
        if isinstance(truth, str)
        else str(truth[0])
        if isinstance(truth, list) and truth
        else str(truth)
    )
