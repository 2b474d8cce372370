"""The log-probs of frozen teachers for the tokens of a batch, and their part in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from millrace.algorithms.distillation import divergence
from millrace.train.layout import Ints
from millrace.train.options import StepOptions
from millrace.train.packing import Outputs
from millrace.train.rows import BatchArrays, Rows


class Teacher(Protocol):
    """A forward pass without gradients."""

    def tokens(
        self, rows: Rows, members: Ints | None = None, *, temperature: float
    ) -> list[Tensor]:
        """Return log-probs and entropies of the trained tokens of the rows `members`, [K] float64.

        If the policy learns from distributions, the teacher's likeliest tokens follow, then their
        log-probs.
        """
        ...


@dataclass(frozen=True, slots=True)
class GivenTeacher:
    """A teacher outside of the trainer. Its log-probs came with the samples."""

    log_probs: Tensor
    """[K] float64."""

    def tokens(
        self, rows: Rows, members: Ints | None = None, *, temperature: float
    ) -> list[Tensor]:
        return [self.log_probs, torch.zeros_like(self.log_probs)]


@dataclass(frozen=True, slots=True)
class Taught:
    """The log-probs of T teachers for K tokens, on the host. Those that teach no token are 0."""

    weights: Tensor
    """[K, T] float64 weight of each teacher."""
    log_probs: Tensor
    """[K, T] float64 log p of the drawn token."""
    candidates: Tensor
    """[K, T x topk] float32 log-probs of each teacher's likeliest tokens, which Rows.candidates has."""
    metrics: dict[str, float]
    """distillation/NAME/kl: mean of the rollout's log-prob - the teacher's, KL(rollout || teacher)."""

    def part(
        self, source: Tensor, outputs: Outputs, mask: Tensor, options: StepOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the advantages and the losses of teachers for the tokens `source`, each [M].

        outputs  log-probs, entropies and the log-probs of candidates, each [M]
        mask     [M] bool: tokens that are trained; the others get 0
        """
        log_probs = outputs[0].masked_fill(~mask, 0.0)
        weights = self.weights[source].to(log_probs).unbind(-1)
        advantages, losses = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
        topk = options.distillation.candidates
        if not topk:
            teachers = self.log_probs[source].to(log_probs).unbind(-1)
            for weight, teacher in zip(weights, teachers, strict=True):
                part = weight * options.signal(log_probs.detach(), teacher)
                advantages = advantages + torch.where(mask & (weight > 0), part, 0.0)
            return advantages, losses
        forward = options.distillation.loss_mode == "forward_kl_topk"
        of_policy = torch.stack(outputs[2:], -1).split(topk, -1)
        of_teachers = self.candidates[source].to(log_probs).split(topk, -1)
        for weight, own, teacher in zip(weights, of_policy, of_teachers, strict=True):
            # A factor of 0 would make NaN of what is not finite.
            unused = ~(mask & (weight > 0)).unsqueeze(-1)
            pairs = (x.masked_fill(unused, -1e3) for x in (own, teacher))
            losses = losses + weight * divergence(*pairs, forward=forward)
        return advantages, losses


def likeliest(teacher: Teacher, rows: Rows, topk: int) -> tuple[Rows, Tensor]:
    """Return the rows with the likeliest tokens of a teacher, and their log-probs, [K, topk]."""
    _, _, *more = teacher.tokens(rows, temperature=1.0)
    candidates = torch.stack(more[:topk], -1).long().numpy()
    return replace(rows, candidates=candidates), torch.stack(more[topk:], -1).float()


def ask(
    teachers: Mapping[str, Teacher], batch: BatchArrays, rows: Rows, options: StepOptions
) -> tuple[Taught, Rows]:
    """Return what the teachers say, and the rows with their candidates.

    A teacher reads only the rows that it teaches.
    """
    topk, count = options.distillation.candidates, len(batch.ids)
    teachers = {**teachers, **{name: GivenTeacher(own) for name, own in batch.given.items()}}
    teachers = {name: teachers[name] for name in batch.taught}  # in the order of the configuration
    weights = torch.stack([batch.taught[name] for name in teachers], -1)
    log_probs = torch.zeros(count, len(teachers), dtype=torch.float64)
    candidates = np.zeros((count, len(teachers) * topk), dtype=np.int64)
    of_candidates = torch.zeros(count, len(teachers) * topk)
    metrics = dict[str, float]()
    for i, (name, teacher) in enumerate(teachers.items()):
        taught = weights[:, i] > 0
        members = np.flatnonzero(taught.numpy()[rows.trajectory] & (rows.trained_tokens > 0))
        if not len(members):
            continue
        own, _, *more = teacher.tokens(rows, members, temperature=options.temperature)
        log_probs[:, i] = own
        at, part = taught[batch.ids], slice(i * topk, (i + 1) * topk)
        if topk:
            candidates[:, part] = torch.stack(more[:topk], -1).long().numpy()
            of_candidates[:, part] = torch.stack(more[topk:], -1)
        gap = (batch.rollout - own)[at]
        metrics[f"distillation/{name}/kl"] = gap[gap.isfinite()].mean().item()
    taught_by = Taught(weights[batch.ids], log_probs, of_candidates, metrics)
    return taught_by, replace(rows, candidates=candidates) if topk else rows
