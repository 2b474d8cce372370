"""Checks of teachers, before any model loads: their tokenizers, and the rows that name them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config import Config
from millrace.config.teacher_keys import weights_of
from millrace.data.rows import Problem
from millrace.errors import bad_row, bad_value
from millrace.models.checks import has_weights
from millrace.run.model_folders import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_row(config: Config, row: Problem, where: str) -> None:
    """Raise DataError if a row names a wrong teacher, or if nothing would train its samples."""
    try:
        weights = weights_of(config.teachers, row.data_source, row.extra_info)
    except ValueError as error:
        fix = "such as math, [math, code] or {math: 0.5}, with names of teachers.NAME"
        given = row.extra_info.get("teachers")
        raise bad_row(f"{where}, extra_info.teachers", given, str(error), fix) from None
    if not weights and not config.learns_from_rewards:
        rule = "no teacher has this data source, and the run learns from teachers alone"
        fix = (
            "extra_info.teachers, teachers.NAME.data_sources, or distillation.use_task_rewards=true"
        )
        raise bad_row(f"{where}, data_source", row.data_source, rule, fix)


def check_models(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if a teacher has no weights, or reads a token as another one."""
    own = tokenizer.get_vocab() if config.teachers else {}
    if config.distillation.candidates > len(own) > 0:
        key, topk = "distillation.topk", config.distillation.topk
        rule = f"the vocabulary has {len(own)} tokens"
        raise bad_value(key, topk, rule, f"{key}={len(own)} for whole distributions")
    for name, teacher in config.teachers.items():
        key, folder = f"teachers.{name}.path", Path(teacher.path)
        if folder.is_dir() and not has_weights(folder):
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
