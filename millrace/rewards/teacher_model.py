"""A teacher in a worker process: a frozen causal language model that reads tokens in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from millrace.config import TeacherConfig
from millrace.errors import RewardError, bad_value
from millrace.rewards.model import load_whole
from millrace.rewards.wire import Call
from millrace.types import Floats, floats_of


@dataclass(frozen=True)
class TeacherModel:
    """Satisfies batches.Scorer."""

    key: str
    model: Any
    batch_size: int
    temperature: float

    @classmethod
    def load(cls, key: str, spec: dict[str, Any]) -> TeacherModel:
        """Load the model onto the device. `key` is the section's name.

        Raise ConfigError if the path has no causal language model whose weights are complete.
        """
        temperature = spec.pop("temperature")
        config = TeacherConfig.model_validate(spec)
        # The driver gives a worker one GPU, or tells it to use the CPU.
        device = torch.device("cuda" if config.device == "cuda" else "cpu")
        kind = "causal language model"
        fix = f"the folder or hub id of a Hugging Face {kind}"
        model = load_whole(
            AutoModelForCausalLM,
            config,
            kind,
            lambda rule: bad_value(f"{key}.path", config.path, rule, fix),
        )
        return cls(key, model.to(device).eval(), config.batch_size, temperature)

    def encode(self, call: Call, completion: str) -> list[int]:
        return call.completion_ids[0]

    @torch.inference_mode()
    def score(self, batch: Sequence[list[int]]) -> list[Floats]:
        """Return log p of each token after those before it, and 0 for the first one.

        Rows are padded on the right, which no token before it reads. Raise RewardError if the
        device has too little memory for the batch.
        """
        width = max(map(len, batch))
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        device = self.model.device
        try:
            logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            found = [self._of(logits[i], tokens) for i, tokens in enumerate(batch)]
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            rule = f"{len(batch)} threads of {width} tokens do not fit"
            fix = f"a smaller {self.key}.batch_size"
            raise RewardError("out_of_memory", f"{rule}: {fix}") from error
        return found

    def _of(self, logits: torch.Tensor, tokens: list[int]) -> Floats:
        at = torch.tensor(tokens[1:], device=logits.device).unsqueeze(-1)
        log_probs = (logits[: len(at)].float() / self.temperature).log_softmax(-1)
        return floats_of([0.0, *log_probs.gather(-1, at)[:, 0].tolist()])
