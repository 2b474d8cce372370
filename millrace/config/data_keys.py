"""The keys of the problems and their rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.config.reward_keys import NAMES, RESERVED, SET_FOR_FUNCTIONS, MixedReward, OneReward
from millrace.config.section import (
    STREAM,
    Choices,
    Fixed,
    FixedRows,
    NoEffectOnWeights,
    ReadWith,
    Rule,
    Section,
    Sources,
)
from millrace.errors import bad_value


def _same_reading(now: Any, before: Any, key: str) -> bool:
    """Return whether the built model of both has no chat template, and none is demanded."""
    return not now.model.path and "always" not in (now.data.chat, before.data.chat)


def _same_function(now: Any, before: Any, key: str) -> bool:
    """Return whether both name the same function, maybe in a file that moved."""
    names = [config.value_of(key).rpartition(":")[2] for config in (now, before)]
    return bool(names[0]) and names[0] == names[1]


class DataConfig(Section):
    train_files: Annotated[Sources, FixedRows(STREAM), NoEffectOnWeights()] = ()
    """Sources of problems to train on.

    They are .parquet, .jsonl or .json files, hub ids (owner/name:split),
    reasoning_gym:NAME?param=value, or task:NAME?param=value.
    """
    val_files: Annotated[Sources, NoEffectOnWeights()] = ()
    """Sources of problems for validation. They are never trained."""
    train_batch_size: int = Field(0, ge=0)
    """Samples of one window, in the modes colocate_sync and one_step_off only.

    It sets async_training.trigger_parameter_sync_step. Must be 0 in all other modes.
    """
    gen_batch_size: int = Field(1, ge=1)
    """Samples that are admitted at a time. millrace admits them one by one, so this must be 1."""
    prompt_key: Annotated[str, Fixed(STREAM)] = "prompt"
    """Column of the prompt. A prompt is a list of messages, or a string."""
    chat: Annotated[
        Literal["auto", "always", "never"],
        Fixed(
            "its prompts in flight were read with it",
            _same_reading,
            "another value with model.path",
        ),
    ] = "auto"
    """Whether a prompt that is a string goes through the chat template, as one message of the user.

    auto: if model.path has a chat template that millrace has not written. A string that begins with
    the template's markup is read as it is, with its special tokens. always refuses a model without
    a template, and never refuses messages. Where agents play, they make the messages.
    """
    shuffle: Annotated[bool, Fixed(STREAM), ReadWith({".sampler": ("",)})] = True
    """Whether to shuffle the data in each epoch. trainer.seed decides the order."""
    sampler: Annotated[
        str,
        Choices(("",)),
        Fixed("it decided the rows of the samples in flight", _same_function, "another function"),
    ] = ""
    """Curriculum: path.py:name of a function of your own that decides the row of each prompt.

    It replaces the shuffle. docs/own_algorithm.md explains it.
    """
    filter_overlong_prompts: Annotated[bool, Fixed(STREAM)] = False
    """Leave out prompts that are longer than rollout.max_prompt_length, and report their number.

    With false, such a prompt is an error.
    """
    train_max_samples: Annotated[int, FixedRows(STREAM), NoEffectOnWeights()] = Field(0, ge=0)
    """Use only this many of the first training rows. 0 uses all rows."""
    appended_rows: Annotated[Literal["refuse", "use"], NoEffectOnWeights()] = "refuse"
    """What a resume does if rows were added at the end of the training data.

    refuse ends the command. use trains on them from the next epoch on.
    """
    val_max_samples: Annotated[int, NoEffectOnWeights()] = Field(0, ge=0)
    """Use only this many of the first validation rows. 0 uses all rows."""

    def rules(self, here: str) -> Iterator[Rule]:
        rule = "samples are admitted one by one"
        yield self.gen_batch_size != 1, "gen_batch_size", rule, "data.gen_batch_size=1"


class OverlongBufferConfig(Section):
    enable: bool = False
    """DAPO's soft penalty for long responses, in training only.

    It is 0 up to rollout.max_response_length - len tokens and falls linearly to -penalty_factor at
    the limit. It is added to the score, and `reward/overlong_reward/mean` is its mean.
    """
    len: int = Field(0, ge=0)
    """Tokens before the limit over which the penalty grows."""
    penalty_factor: float = Field(1.0, ge=0)
    """Largest penalty."""


class RewardConfig(OneReward):
    mix: dict[str, MixedReward] = Field(default_factory=dict)
    """Several rewards by name, each with a weight and the keys of a reward.

    The score is their weighted sum. Empty uses the one reward that the keys above describe.
    reward.mix={} removes all inherited parts.
    """
    retries: int = Field(0, ge=0)
    """How often a score that failed is asked for again before its sample is dropped.

    The waits between the tries grow, from about a quarter of a second.
    """
    max_error_share: float = Field(0.2, ge=0, le=1)
    """The run fails if errors of rewards or agents dropped more than this share of the last 50 samples.

    0 ends the run at the first one. In a validation, it is a share of the responses, where fewer
    than 50 count as 50.
    """
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    """Penalty for long responses."""

    @property
    def parts(self) -> dict[str, OneReward]:
        """The rewards by the name of their section: reward, or reward.mix.NAME."""
        mixed = {f"reward.mix.{name}": part for name, part in self.mix.items()}
        return {**mixed} if mixed else {"reward": self}

    def rules(self, here: str) -> Iterator[Rule]:
        yield from super().rules(here)
        for name in self.mix:
            if not re.fullmatch(r"[A-Za-z]\w*", name) or name in RESERVED:
                rule = "a part's name has letters, digits and _, and is none of "
                rule += ", ".join(RESERVED)
                raise bad_value("reward.mix", name, rule, "another name for this part")
        for key in (*NAMES, *SET_FOR_FUNCTIONS):
            rule, fix = "reward.mix already names the rewards", f"a part of reward.mix with {key}"
            yield self.mix and self.value_of(key), key, rule, fix
