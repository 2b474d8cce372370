"""A value model: the policy's architecture and start weights, with a scalar head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.train import packed_attention as attention
from millrace.train.fsdp.policy import layers_of, states_before_targets, train_pad_token
from millrace.train.packing import MicroBatch, attention_length


class PackedCritic(nn.Module):
    """A critic on the body of `model`, which it changes. Its head and its values start at 0."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        model.set_attn_implementation(attention.NAME)
        train_pad_token(model)
        model.train(False)
        self.body = cast(PreTrainedModel, model.base_model)
        self.attention_length = attention_length(model.config.get_text_config())
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=True)
        nn.init.zeros_(self.head.weight)
        self.head.to(next(self.body.parameters()).dtype)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor]:
        """Return the value of the state before each trained token, [M] float32.

        A float64 model returns float64. `temperature` is not used.
        """
        states, mine = states_before_targets(self.body, batch)
        values: Tensor = self.head(states).squeeze(-1).clone()  # FSDP wants no view
        values = values if values.dtype == torch.float64 else values.float()
        (values,) = batch.layout.share.joined([values], mine, len(batch.select))
        return (values,)

    def layers(self) -> list[nn.Module]:
        """Return the decoder layers, in order: the units of sharding."""
        return layers_of(self.body)

    @torch.no_grad()
    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of the policy's body, by name, and set the head to 0.

        Both bodies must have the same sharding.
        """
        copy_weights(weights, self.body)
        for parameter in self.head.parameters():
            parameter.zero_()


@torch.no_grad()
def copy_weights(weights: Mapping[str, Tensor], target: nn.Module) -> None:
    """Copy weights, by name, from a module with the same sharding as `target`."""
    for name, parameter in target.named_parameters():
        parameter.copy_(weights[name])
