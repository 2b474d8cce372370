"""The keys of the problems and their rewards."""

from __future__ import annotations

import re

from pydantic import Field

from millrace.config.section import Section, Sources
from millrace.errors import bad_value


class DataConfig(Section):
    train_files: Sources = ()
    """Sources of problems to train on.

    They are .parquet, .jsonl or .json files, hub ids (owner/name:split),
    reasoning_gym:NAME?param=value, or task:NAME?param=value.
    """
    val_files: Sources = ()
    """Sources of problems for validation. They are never trained."""
    train_batch_size: int = Field(0, ge=0)
    """Samples of one window, in the modes colocate_sync and one_step_off only.

    It sets async_training.trigger_parameter_sync_step. Must be 0 in all other modes.
    """
    gen_batch_size: int = Field(1, ge=1)
    """Samples that are admitted at a time. millrace admits them one by one, so this must be 1."""
    prompt_key: str = "prompt"
    """Column of the prompt. A prompt is a list of messages, or a string."""
    shuffle: bool = True
    """Whether to shuffle the data in each epoch. trainer.seed decides the order."""
    filter_overlong_prompts: bool = False
    """Leave out prompts that are longer than rollout.max_prompt_length, and report their number.

    With false, such a prompt is an error.
    """
    train_max_samples: int = Field(0, ge=0)
    """Use only this many of the first training rows. 0 uses all rows."""
    val_max_samples: int = Field(0, ge=0)
    """Use only this many of the first validation rows. 0 uses all rows."""

    def check(self) -> None:
        if self.gen_batch_size != 1:
            raise bad_value(
                "data.gen_batch_size",
                self.gen_batch_size,
                "samples are admitted one by one",
                "data.gen_batch_size=1",
            )


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


class FormatConfig(Section):
    pattern: str = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
    """Regular expression of a well-formed response, for reward.function=format.

    The whole response must match. A dot matches every character, also the end of a line.
    """

    def check(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise bad_value(
                "reward.format.pattern",
                self.pattern,
                f"is not a regular expression of Python: {error}",
                "correct it; try it with re.compile(pattern, re.DOTALL)",
            ) from None


class RepetitionPenaltyConfig(Section):
    """The options of reward.function=repetition_penalty."""

    ngram_size: int = Field(3, ge=1)
    """Words in a row that count as one n-gram."""
    max_penalty: float = Field(-1.0, le=0)
    """Score of a response of which all n-grams are repeated. Without a repetition it is 0."""


class RewardConfig(Section):
    function: str = ""
    """Reward function: path.py:name, module:name, or a built-in name such as exact or math.

    A user's function has verl's or TRL's signature. Empty uses the built-in function that belongs
    to each row's data_source. A row of an unknown data_source is then an error.
    """
    format: FormatConfig = FormatConfig()
    """Options of the built-in function format."""
    repetition_penalty: RepetitionPenaltyConfig = RepetitionPenaltyConfig()
    """Options of the built-in function repetition_penalty."""
    num_workers: int = Field(1, ge=1)
    """Processes that call reward functions."""
    max_concurrency: int = Field(1024, ge=1)
    """Coroutines that one process awaits at a time if the reward function is `async`.

    A function that scores whole groups has one coroutine for each group.
    """
    timeout_s: float = Field(30.0, gt=0)
    """Seconds that one call may take. millrace kills and replaces a process that takes longer."""
    max_error_share: float = Field(0.2, ge=0, le=1)
    """The run fails if reward errors dropped more than this share of the last 50 samples."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    """Penalty for long responses."""
