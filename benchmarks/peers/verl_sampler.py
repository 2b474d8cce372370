"""The replay buffer of verl's synchronous trainer, asked every 0.05 s in place of 2 s.

With 2 s, a step draws for 2.1 s whatever the responses take. verl has no key for it, but takes the
class of `trainer.v1.sampler.custom_sampler`.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class PromptBuffer(ReplayBuffer):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__(poll_interval=0.05, **options)
