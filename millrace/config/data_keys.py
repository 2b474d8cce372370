"""The keys of the problems and their rewards."""

from __future__ import annotations

from pydantic import Field

from millrace.config.section import Section, Sources
from millrace.errors import bad_value


class DataConfig(Section):
    train_files: Sources = ()
    """Sources: .parquet, .jsonl or .json files, hub ids (owner/name:split),
    reasoning_gym:NAME?param=value, task:NAME?param=value."""
    val_files: Sources = ()
    """Sources of held-out problems."""
    train_batch_size: int = Field(0, ge=0)
    """Samples of one window, in the modes colocate_sync and one_step_off: sets
    trigger_parameter_sync_step. 0 leaves the trigger as given; must be 0 in all other modes."""
    gen_batch_size: int = Field(1, ge=1)
    """Samples admitted at a time; streaming modes admit one by one, so 1."""
    prompt_key: str = "prompt"
    """Column of the prompt: messages, or a string."""
    shuffle: bool = True
    """Whether each epoch's order is drawn from trainer.seed."""
    filter_overlong_prompts: bool = False
    """Leave out prompts over rollout.max_prompt_length, with a count, instead of refusing the
    data."""
    train_max_samples: int = Field(0, ge=0)
    """First rows that are used; 0 uses all."""
    val_max_samples: int = Field(0, ge=0)
    """First validation rows that are used; 0 uses all."""

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
    """DAPO's soft punishment of long responses, in training: 0 up to rollout.max_response_length -
    len tokens, from there linear down to -penalty_factor at the limit. Added to the score;
    `reward/overlong_reward/mean` is its mean."""
    len: int = Field(0, ge=0)
    """Tokens before the limit over which the penalty grows."""
    penalty_factor: float = Field(1.0, ge=0)
    """Largest penalty."""


class RewardConfig(Section):
    function: str = ""
    """path.py:name or module:name of a reward function in verl's or TRL's signature; empty takes
    the data source's own."""
    num_workers: int = Field(1, ge=1)
    """Processes that call reward functions. A coroutine function is awaited, many at a time, in
    each of them."""
    max_concurrency: int = Field(1024, ge=1)
    """Coroutines awaited at a time in each process."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds one call may take; a worker that runs past it is killed and replaced."""
    max_error_share: float = Field(0.2, ge=0, le=1)
    """The run fails if more than this share of the last 50 samples was dropped for reward
    errors."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    """Overlong reward shaping."""
