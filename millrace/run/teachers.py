"""The teachers of a run: their checks before any model loads, and those outside of the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config import DistillationConfig, SftConfig, TeacherConfig
from millrace.config.teacher_keys import weights_of
from millrace.data.prompts import PromptStream
from millrace.data.rows import Problem
from millrace.errors import bad_row, bad_value
from millrace.models.checks import has_weights
from millrace.ports import Teacher
from millrace.rewards.teacher import OwnTeacher, ServedTeacher
from millrace.rollout.retry import RetryingTeacher
from millrace.run.model_folders import load_tokenizer
from millrace.types import Prompt
from millrace.waits.registry import starting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOKED_AT = 64
"""Rows among which the first one that a teacher teaches is looked for."""
_READ = 2_000
"""Training rows among which each teacher should have one."""
_NONE: Mapping[str, TeacherConfig] = {}
_NO_DEVICES: Mapping[str, tuple[str, Sequence[Mapping[str, str]]]] = {}


def check_row(
    teachers: Mapping[str, TeacherConfig], rewarded: bool, row: Problem, where: str
) -> None:
    """Raise DataError if a row names a wrong teacher, or if nothing would train its samples."""
    try:
        weights = weights_of(teachers, row.data_source, row.extra_info)
    except ValueError as error:
        fix = "such as math, [math, code] or {math: 0.5}, with names of teachers.NAME"
        given = row.extra_info.get("teachers")
        raise bad_row(f"{where}, extra_info.teachers", given, str(error), fix) from None
    if not weights and not rewarded:
        rule = "no teacher has this data source, and the run learns from teachers alone"
        fix = (
            "extra_info.teachers, teachers.NAME.data_sources, or distillation.use_task_rewards=true"
        )
        raise bad_row(f"{where}, data_source", row.data_source, rule, fix)


def idle(teachers: Mapping[str, TeacherConfig], train: PromptStream) -> Iterator[str]:
    """Yield a warning for each teacher that no row has, among the first ones."""
    left, sources, count = set(teachers), set[str](), min(len(train), _READ)
    for at in range(count if left else 0):
        row = train.problem_of(at)
        left -= weights_of(teachers, row.data_source, row.extra_info).keys()
        sources.add(row.data_source)
        if not left:
            return
    for name in sorted(left):
        yield (
            f"warning: teachers.{name}: none of the first {count} training rows has this teacher. "
            f"Their data sources are {', '.join(sorted(sources)[:5])}. "
            f"Fix: teachers.{name}.data_sources, or extra_info.teachers of rows"
        )


def check_models(
    teachers: Mapping[str, TeacherConfig],
    distillation: DistillationConfig,
    sft: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raise ConfigError if a teacher has no weights, or reads a token as another one."""
    own = tokenizer.get_vocab() if teachers else {}
    numbers = {
        "distillation.topk": distillation.candidates,
        "sft.teacher_topk": sft.teacher_topk if sft.teacher else 0,
    }
    for key, topk in numbers.items():
        if topk > len(own) > 0:
            rule = f"the vocabulary has {len(own)} tokens"
            raise bad_value(key, topk, rule, f"{key}={len(own)} for whole distributions")
    for name, teacher in teachers.items():
        key, folder = f"teachers.{name}.path", Path(teacher.path)
        if not teacher.path:
            continue  # `open_teachers` asks the endpoint
        if folder.is_dir() and not has_weights(folder) and not teacher.base_url:
            fix = "*.safetensors in the folder; for a run's model, `millrace export RUN FOLDER`"
            raise bad_value(key, teacher.path, "the folder has no weights", fix)
        others = load_tokenizer(key, teacher.path, trusts=teacher.trust_remote_code).get_vocab()
        different = [token for token, at in own.items() if others.get(token) != at]
        if different:
            token = min(different, key=own.__getitem__)
            there = others.get(token, "missing")
            raise bad_value(
                key,
                teacher.path,
                f"its tokenizer has {len(different)} of the policy's {len(own)} tokens elsewhere, "
                f"such as {token!r}: {there} instead of {own[token]}",
                "a teacher with the policy's tokenizer",
            )


class OutsideTeachers:
    """The teachers of a run that are outside of the trainer."""

    def __init__(
        self,
        teachers: Mapping[str, TeacherConfig] = _NONE,
        *,
        temperature: float = 1.0,
        devices: Mapping[str, tuple[str, Sequence[Mapping[str, str]]]] = _NO_DEVICES,
        note: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`devices` are those of `rewards.devices_of`. `note` gets what a user should know."""
        self._note = note
        self._teachers = teachers
        outside = {name: one for name, one in teachers.items() if one.outside}
        self.opened: dict[str, OwnTeacher | ServedTeacher] = {}
        for name, one in outside.items():
            key = f"teachers.{name}"
            if one.base_url:
                self.opened[name] = ServedTeacher.load(key, one)
            else:
                device, environments = devices[key]
                placed = one.model_copy(update={"device": device})
                self.opened[name] = OwnTeacher(key, placed, temperature, environments)
        self._patient = {
            name: RetryingTeacher(
                name,
                self.opened[name],
                address=one.base_url or one.path,
                fix=f"start its server, or correct teachers.{name}.base_url,"
                if one.base_url
                else "look at what its workers print on stderr,",
                deadline_s=one.wait_deadline_s,
                drops=one.on_failure == "drop",
                note=note,
            )
            for name, one in outside.items()
        }

    def of(self, prompt: Prompt) -> Mapping[str, Teacher]:
        """Return those that teach a prompt."""
        if not self._patient:
            return {}
        named = weights_of(self._teachers, prompt.data_source, prompt.extra_info)
        return {name: self._patient[name] for name in named if name in self._patient}

    def take_figures(self) -> dict[str, float]:
        """Return the work of each teacher since the last call of this method.

        The names are teacher/NAME/FIGURE.
        """
        return {
            f"teacher/{name}/{figure}": value
            for name, one in self.opened.items()
            for figure, value in one.take_figures().items()
        }

    async def check(self, train: PromptStream, longest: int) -> None:
        """Ask each teacher for a prompt that it teaches. Raise ConfigError if it cannot teach."""
        first = [train[i] for i in range(min(_LOOKED_AT, len(train)))] if self.opened else []

        def ids(text: str) -> list[int]:
            return list(train.chat.tokenizer.encode(text, add_special_tokens=False))

        async def one(name: str, teacher: OwnTeacher | ServedTeacher) -> None:
            await teacher.start()
            prompt = next((p for p in first if name in self.of(p)), first[0])
            compared = await teacher.check(prompt, longest, ids)
            if not compared and not self._teachers[name].path:
                self._note(
                    f"teachers.{name}: its tokenizer was not compared with the policy's, because "
                    f"the endpoint has no /tokenize. teachers.{name}.path=FOLDER compares it"
                )

        with starting("teachers"):
            await asyncio.gather(*(one(*pair) for pair in self.opened.items()))
        self.take_figures()


@asynccontextmanager
async def open_teachers(
    outside: OutsideTeachers, train: PromptStream, longest: int
) -> AsyncIterator[OutsideTeachers]:
    """Start and check the teachers outside of the trainer. `longest` is that of a trajectory."""
    try:
        await outside.check(train, longest)
        yield outside
    finally:
        await asyncio.gather(*(one.close() for one in outside.opened.values()))
