"""A value model: the policy's architecture and start weights, with a scalar head in place of the vocabulary's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.train.fsdp import packed_attention as attention
from millrace.train.fsdp.policy import layers_of
from millrace.train.packing import MicroBatch


class PackedCritic(nn.Module):
    """Takes over the body of `model`. The head starts at 0: every value does."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        model.set_attn_implementation(attention.NAME)
        model.train(False)
        self.body = cast(PreTrainedModel, model.base_model)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=True)
        nn.init.zeros_(self.head.weight)
        self.head.to(next(self.body.parameters()).dtype)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor]:
        """Value of the state before each trained token, [M] float32 (float64 for a float64 model). `temperature` is not used."""
        hidden = self.body(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            use_cache=False,
            packed_layout=batch.layout,
        ).last_hidden_state[0]
        values: Tensor = (
            self.head(hidden.index_select(0, batch.select)).squeeze(-1).clone()
        )  # FSDP wants no view
        return (values if values.dtype == torch.float64 else values.float(),)

    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order: the units of sharding."""
        return layers_of(self.body)

    @torch.no_grad()
    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """The weights of the policy's body, by name, and a head of 0. Both are sharded alike."""
        copy_weights(weights, self.body)
        for parameter in self.head.parameters():
            parameter.zero_()


@torch.no_grad()
def copy_weights(weights: Mapping[str, Tensor], target: nn.Module) -> None:
    """Weights by name, of a module that is sharded as `target` is."""
    for name, parameter in target.named_parameters():
        parameter.copy_(weights[name])
