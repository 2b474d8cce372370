"""A transformers causal LM as a policy over packed tokens: log-probs and entropies."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.errors import bad_value
from millrace.train import packed_attention as attention
from millrace.train.fsdp.routers import Routers
from millrace.train.log_probs import log_probs_and_entropy, sum_of_squares, top_log_probs
from millrace.train.packing import MicroBatch, attention_length


class PackedPolicy(nn.Module):
    """A policy on a model, which it changes: attention then works on packed rows.

    This module's forward uses the lm_head. FSDP therefore gathers the lm_head for it, whether it is
    tied to the embeddings or not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        checkpoint_share: float = 0.0,
        fused: bool = False,
        replays: bool = True,
    ) -> None:
        """Take over `model`. Raises ConfigError if its logits are not hidden x lm_head^T alone.

        `checkpoint_share` is the share of the decoder layers that recompute their activations in
        the backward pass. They are evenly spread. `fused` is the argument of
        `log_probs_and_entropy`. A policy that `replays` uses the experts of a batch.
        """
        super().__init__()
        _check_head(model)
        model.set_attn_implementation(attention.NAME)
        train_pad_token(model)
        # Dropout is always off, because training and rollout must give the same log-probs.
        model.train(False)
        if checkpoint_share:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            # transformers checkpoints only layers in training mode.
            for module in model.modules():
                module.training = not isinstance(module, nn.Dropout)
            for i, layer in enumerate(layers_of(model)):
                cast(Any, layer).gradient_checkpointing = math.ceil(
                    (i + 1) * checkpoint_share
                ) > math.ceil(i * checkpoint_share)
        self.model = model
        self.attention_length = attention_length(model.config.get_text_config())
        self._fused = fused
        self.topk = 0
        """The number of its likeliest tokens that a teacher returns."""
        self.vocabulary: int | None = None
        """The tokens of the policy. Models of one family have unlike numbers of unused ones."""
        self.routers = Routers(model) if replays else None

    def forward(
        self, batch: MicroBatch, temperature: float, squares: bool = False
    ) -> tuple[Tensor, ...]:
        """Return log p(target) and entropy, each [M] float32, at `temperature`.

        A float64 model returns float64. The log-probs of the batch's candidates follow, if it has
        any. Without a gradient, `squares` adds the sum of p^2 over the vocabulary, and a policy
        with `topk` the likeliest tokens, then their log-probs.
        """
        if self.routers is not None:
            self.routers.begin(batch)
        states, mine = states_before_targets(self.model.base_model, batch)
        weight = cast(Tensor, output_embeddings(self.model).weight)
        if self.topk:  # a drawn token has its whole probability, wherever the teacher is
            weight = weight[: self.vocabulary]
        targets = batch.targets
        if batch.candidates is not None:
            targets = torch.cat([targets.unsqueeze(-1), batch.candidates], -1)
        log_probs, entropy = log_probs_and_entropy(
            states,
            weight,
            targets if mine is None else targets[mine],
            temperature,
            fused=self._fused,
        )
        outputs: tuple[Tensor, ...] = (log_probs, entropy)
        if batch.candidates is not None:
            drawn, *others = log_probs.unbind(-1)
            outputs = (drawn, entropy, *others)
        if squares:
            outputs = (*outputs, sum_of_squares(states, weight, temperature))
        if self.topk:
            for part in top_log_probs(states, weight, temperature, self.topk):
                outputs = (*outputs, *part.to(entropy.dtype).unbind(-1))
        return batch.layout.share.joined(outputs, mine, len(batch.select))

    def layers(self) -> list[nn.Module]:
        """Return the decoder layers, in order: the units of sharding."""
        return layers_of(self.model)


def states_before_targets(body: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states [m, H] before this rank's targets, and the places of those.

    The places are None if no rank shares the tokens.
    """
    share = batch.layout.share
    hidden = body(
        input_ids=share.part(batch.input_ids).unsqueeze(0),
        position_ids=share.part(batch.position_ids).unsqueeze(0),
        use_cache=False,
        packed_layout=batch.layout,
    ).last_hidden_state[0]
    select, mine = share.selected(batch.select)
    return hidden.index_select(0, select), mine


def train_pad_token(model: PreTrainedModel) -> None:
    """Let the embedding of the pad token get its gradient as an input.

    transformers drops it. Packed rows have no padding, and the pad token of some models is one of
    their texts: SmolLM2's is <|im_end|>, which ends every message.
    """
    embedding: Any = model.get_input_embeddings()  # type: ignore[no-untyped-call]
    embedding.padding_idx = None


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def output_embeddings(model: PreTrainedModel) -> nn.Module:
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def _check_head(model: PreTrainedModel) -> None:
    """Raise ConfigError for models whose logits are not hidden @ weight^T alone."""
    head = output_embeddings(model)
    config = model.config.get_text_config()
    odd = [
        key
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling")
        if getattr(config, key, None) not in (None, 1.0)
    ]
    if not isinstance(head, nn.Linear) or head.bias is not None:
        odd.append("a bias in the lm_head" if isinstance(head, nn.Linear) else "no linear lm_head")
    if odd:
        raise bad_value(
            "model.path",
            type(model).__name__,
            f"its logits are not hidden x lm_head^T alone ({', '.join(odd)})",
            "a model without them, such as Qwen2, Qwen3, Llama or Mistral",
        )
