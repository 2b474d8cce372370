"""The losses of policy and critic on one micro-batch, and the sums for a step's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from millrace.algorithms.correction import correct, off_policy_mask
from millrace.algorithms.correction_plan import CorrectionStage
from millrace.algorithms.kl import KL, weighted_by_ratio
from millrace.algorithms.policy_loss import LossInput
from millrace.algorithms.proximal import ESTIMATES
from millrace.algorithms.value_loss import value_loss
from millrace.train.experience import Experience
from millrace.train.mini_batch import MiniBatch
from millrace.train.options import StepOptions
from millrace.train.packing import MicroBatch, Outputs, check_whole

POLICY_SUMS = (
    "loss",
    "pg_loss",
    "kl_loss",
    "tokens",
    "entropy",
    "clipped",
    "clipped_lower",
    "log_ratio",
    "off_policy_masked",
    "distillation_loss",
)
"""Sums of a micro-batch of the policy, in this order.

loss, pg_loss, kl_loss and distillation_loss are shares of the global loss. The others are sums over
trained tokens.
"""
CRITIC_SUMS = ("loss", "tokens", "clipped")


class PolicyLoss:
    """The policy's loss on one mini-batch.

    loss = policy loss + kl_loss_coef x KL - entropy_coeff x entropy + distillation_loss_coef x
    divergence from teachers. Each term is aggregated. Teachers of k1 have a part in the advantages.
    """

    def __init__(self, data: Experience, mini: MiniBatch, options: StepOptions) -> None:
        if options.whole_trajectories:
            check_whole(data.rows, options.max_tokens)
        self.data = data
        self.mini = mini
        self.rows, self.members, self.tokens = data.rows, mini.members, mini.tokens
        self.actor = options.actor
        self.token_losses = options.policy_loss
        self.options = options.loss
        self.step_options = options
        self.distillation_coef = options.distillation.distillation_loss_coef
        self.plan = options.correction
        self.interpolated = data.old is None and self.plan.proximal in ESTIMATES

    def __call__(self, outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's share of the loss, and its POLICY_SUMS [10] float64, detached.

        `outputs` are log-probs, entropy and the log-probs of candidates, each [M].
        """
        at = self._columns(micro, outputs[0])
        mask = at["mask"] > 0
        # The loss must not read other tokens: a log-prob of -inf times a factor of 0 is NaN.
        log_probs, entropy = (x.masked_fill(~mask, 0.0) for x in outputs[:2])
        signal = divergence = torch.zeros_like(log_probs)
        if self.data.taught is not None:
            given = micro.source, outputs, mask, self.step_options
            signal, divergence = self.data.taught.part(*given)
            at["advantages"] = at["advantages"] + self.distillation_coef * signal
        old = self._old(at, log_probs)
        losses, stats = self.token_losses(
            LossInput(
                log_probs=log_probs,
                old_log_probs=old,
                advantages=at["advantages"],
                sequence_ids=micro.sequence.to(log_probs.device),
                num_sequences=micro.num_sequences,
                mask=mask,
                selected=at["selected"] > 0 if "selected" in at else None,
            ),
            self.options,
        )
        stays = self._stays(at, log_probs, micro)
        for factors in (*self._weights(at, log_probs, old, micro), stays):
            losses = losses * factors
        pg_loss = (losses * at["factors"]).sum()
        loss, kl_loss = pg_loss, pg_loss.new_zeros(())
        if self.actor.use_kl_loss:
            estimator = KL[self.actor.kl_loss_type]
            if self.actor.use_bias_correction_kl:
                kl = weighted_by_ratio(estimator, log_probs, at["reference"], old)
            else:
                kl = estimator(log_probs, at["reference"])
            kl_loss = (kl * at["factors"]).sum()
            loss = loss + self.actor.kl_loss_coef * kl_loss
        if self.actor.entropy_coeff:
            loss = loss - self.actor.entropy_coeff * (entropy * at["factors"]).sum()
        if self.data.taught is not None:
            loss = loss + self.distillation_coef * (divergence * at["factors"]).sum()
        with torch.no_grad():
            per_token = (
                at["mask"],
                entropy * at["mask"],
                stats["clipped"],
                stats["clipped_lower"],
                stats["log_ratio"],
                at["mask"] * (1 - stays),
            )
            sums = torch.cat(
                [
                    torch.stack([loss.detach(), pg_loss.detach(), kl_loss.detach()]).double(),
                    torch.stack(per_token).sum(-1, dtype=torch.float64),
                    ((divergence - signal) * at["factors"]).sum(dtype=torch.float64).reshape(1),
                ]
            )
        return loss, sums

    def _columns(self, micro: MicroBatch, like: Tensor) -> dict[str, Tensor]:
        """Return the columns that the loss needs, each [M], by one copy to the device.

        They are 0 for tokens that are not trained, whatever their log-probs are.
        """
        data, mini, source = self.data, self.mini, micro.source
        columns = {
            "advantages": data.advantages,
            "factors": mini.factors,
            "mask": mini.mask,
            "rollout": data.rollout,
        }
        optional = {
            "old": data.old,
            "reference": data.reference if self.actor.use_kl_loss else None,
            "weights": mini.weights,
            "selected": mini.selected,
            "ages": data.ages if self.interpolated else None,
        }
        columns |= {name: column for name, column in optional.items() if column is not None}
        # float64 keeps the digits of float64 models, and costs a few bytes per token.
        stacked = torch.stack([column[source].double() for column in columns.values()])
        stacked.masked_fill_(~mini.mask[source], 0.0)
        return dict(zip(columns, stacked.to(like), strict=True))

    def _old(self, at: Mapping[str, Tensor], log_probs: Tensor) -> Tensor:
        """Return the log-probs [M] in the denominator of the ratios.

        If a batch has a single step and no old log-probs, these are the current ones.
        """
        if "old" in at:
            return at["old"]
        if self.interpolated:
            return ESTIMATES[self.plan.proximal](at["rollout"], log_probs, at["ages"])
        return log_probs.detach()

    def _weights(
        self, at: Mapping[str, Tensor], log_probs: Tensor, old: Tensor, micro: MicroBatch
    ) -> Iterator[Tensor]:
        """Yield the importance weights [M] of the token losses, and the mask of high entropy.

        In passing, the numerator of a weight is the interpolated policy if there is one, else the
        current policy. A sequence's weight needs the whole sequence, and a micro-batch has whole
        rows.
        """
        if "weights" in at:
            yield at["weights"]
        if self.plan.place is CorrectionStage.PASSING:
            numerator = old if self.interpolated else log_probs.detach()
            yield correct(
                numerator,
                at["rollout"],
                micro.sequence.to(log_probs.device),
                micro.num_sequences,
                self.plan.options,
                include=at["mask"] > 0,
            ).weights.to(log_probs.dtype)

    def _stays(self, at: Mapping[str, Tensor], log_probs: Tensor, micro: MicroBatch) -> Tensor:
        """Return 0 for the tokens that the off-policy mask takes out, else 1, [M]."""
        threshold = self.plan.off_policy_mask_threshold
        if threshold is None:
            return torch.ones_like(log_probs)
        return off_policy_mask(
            log_probs.detach(),
            at["rollout"],
            micro.sequence.to(log_probs.device),
            micro.num_sequences,
            at["advantages"],
            threshold=threshold,
            include=at["mask"] > 0,
        ).to(log_probs.dtype)


class CriticLoss:
    """The critic's aggregated value loss on one mini-batch, or on its whole responses that ended."""

    def __init__(self, data: Experience, mini: MiniBatch, options: StepOptions) -> None:
        assert data.values is not None and data.returns is not None
        self.rows, self.members, self.tokens = data.rows, mini.members, mini.tokens
        self.columns = (mini.factors, mini.mask.double(), data.values, data.returns)
        if (ended := data.responses) is not None:
            self.rows, self.members = ended.rows, ended.members(data.rows.sample[mini.members])
            factors, mask = ended.factors(self.members, options)
            self.columns = (factors, mask.double(), ended.values, ended.returns)
            self.tokens = int(mask.sum())
        critic = options.critic
        self.cliprange = critic.cliprange_value
        self.huber_delta = critic.huber_delta if critic.loss_fn_type == "huber" else None

    def __call__(self, outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's share of the loss, and its CRITIC_SUMS [3] float64, detached.

        `outputs` are values [M].
        """
        (values,) = outputs
        stacked = torch.stack([column[micro.source] for column in self.columns])
        stacked.masked_fill_(stacked[1] == 0, 0.0)  # as in PolicyLoss
        factors, mask, old, returns = stacked.to(values)
        values = values.masked_fill(mask == 0, 0.0)
        losses, stats = value_loss(
            values, old, returns, cliprange=self.cliprange, huber_delta=self.huber_delta
        )
        loss = (losses * factors).sum()
        sums = torch.stack([loss.detach(), mask.sum(), (stats["clipped"] * mask).sum()]).double()
        return loss, sums
