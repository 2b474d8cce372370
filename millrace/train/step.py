"""The steps of a train engine: experience, mini-batches, losses and metrics, for every engine.

An engine brings its models, which satisfy `Learner`. All ranks make the same calls. The coroutines
compute in the calling thread and block it, so an engine needs its own process or thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.algorithms.distillation import divergence
from millrace.algorithms.kl import adapt
from millrace.config import OptimConfig
from millrace.errors import MillraceError
from millrace.models.model import DTYPES
from millrace.observe.timing import timed as timed_parts
from millrace.ports import Phase, StepReport, TrainBatch
from millrace.train import reference
from millrace.train.displaced import displace_
from millrace.train.experience import Experience, Forward, Models, make_experience
from millrace.train.learner import Learner
from millrace.train.metrics import Meter, batch_metrics, left_out, pad_share
from millrace.train.mini_batch import mini_batches, settle
from millrace.train.options import StepOptions, optim_of
from millrace.train.packing import MicroBatch, Outputs
from millrace.train.policy_loss import CRITIC_SUMS, POLICY_SUMS, CriticLoss, PolicyLoss
from millrace.train.responses import ended_responses
from millrace.train.routing import router_metrics
from millrace.train.rows import BatchArrays, arrays_of, rows_of_examples, rows_of_samples
from millrace.train.state_writer import StateWriter
from millrace.train.teachers import likeliest
from millrace.train.timed import timed
from millrace.types import Floats, Sample, Tokens, floats_of
from millrace.waits.registry import part


class TrainSteps(ABC):
    """One rank of a train engine, without its models, weights and states."""

    actor: Learner
    critic: Learner | None
    reference: Forward | None

    def __init__(self, options: StepOptions, model_folder: str, device: torch.device) -> None:
        self.options = options
        self.model_folder = model_folder
        self.device = device
        self.kl_coef = options.algorithm.kl_ctrl.kl_coef
        self.writer = StateWriter(timeout_s=options.trainer.wait_deadline_s)
        self.owns_group = False
        self._seen_version: int | None = None
        self.teachers: Mapping[str, Forward] = {}
        self._away = False
        """Whether the weights are displaced."""

    rank: int

    @abstractmethod
    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor in the serving dtype), as ports.WeightSource says."""

    @abstractmethod
    def sent_weights(self) -> Iterator[Tensor]:
        """Yield the memory of this rank from which a sync reads. No pass has a copy of it."""

    @abstractmethod
    def restart(self, optim: OptimConfig, horizon: int) -> None:
        """Begin a phase of `horizon` optimizer steps, with optimizer settings `optim`.

        The critic and the reference start from the policy's weights.
        """

    async def begin(self, phase: Phase, horizon: int) -> None:
        self._seen_version = None
        for model in (self.actor, self.critic):
            if model is not None:
                model.max_skipped_steps = self.options.trainer.max_skipped_steps
        self.restart(optim_of(self.options.actor.optim, self.options.sft, phase), horizon)

    @property
    def steps(self) -> int:
        """Optimizer steps since `begin`, skipped ones included."""
        return self.actor.steps

    async def step(self, batch: TrainBatch) -> StepReport:
        """Take one optimizer step for each mini-batch of `ppo_mini_batch_size` samples.

        This is repeated `ppo_epochs` times. The last mini-batch may be short. metrics.py documents
        the metrics, which are the same on every rank, and routing.py those of routers. The totals are those of left_out, and:

        actor/nonfinite_steps  steps skipped because the loss or the gradient was not finite
        actor/rejected_steps   steps skipped because all tokens of the mini-batch were rejected
        train/tokens           prompt and response tokens of the batch, times `ppo_epochs`

        A nonfinite step counts in no other metric.
        """
        with timed_parts("step") as seconds:
            report = self._step(batch)
        return replace(report, seconds=_named(seconds))

    def _step(self, batch: TrainBatch) -> StepReport:
        options = self.options
        models = timed(Models(self.actor, self.critic, self.reference, self.teachers))
        arrays = self._arrays(batch)
        self.actor.lr_scale = batch.lr_scale
        with part("adv"):
            data = make_experience(arrays, models, options, self.kl_coef)
            values: tuple[Floats, ...] = ()
            if arrays.goes_on is not None and data.values is not None:
                split = data.values.split(data.lengths.tolist())
                pairs = zip(batch.samples, split, strict=True)
                values = tuple(floats_of(v.tolist()) for s, v in pairs if s.goes_on)
                known = batch.samples, arrays.scores, split, options.algorithm
                data = replace(data, responses=ended_responses(*known))
        meter, critic_meter = Meter(POLICY_SUMS), Meter(CRITIC_SUMS)
        learners: list[tuple[Learner, type[CriticLoss | PolicyLoss], Meter]] = [
            (self.actor, PolicyLoss, meter)
        ]
        if self.critic is not None:
            learners.insert(0, (self.critic, CriticLoss, critic_meter))
        corrections: list[dict[str, float]] = []
        first_tokens, rejected, kept = torch.zeros_like(data.include), 0, 0
        size = options.actor.ppo_mini_batch_size
        for k, members in enumerate(mini_batches(data, size) * options.actor.ppo_epochs):
            with part("update_actor"):
                mini = settle(data, members, models.policy, options, untouched=k == 0)
            corrections.append(mini.metrics)
            rejected += not mini.tokens
            if k == 0:
                first_tokens = mini.mask
            first_pass = k * size < data.num_samples
            kept += mini.tokens * first_pass
            for model, loss, sums in learners:
                warm = model is not self.actor or model.steps >= options.critic_warmup
                own = loss(data, mini, options)
                with part(f"update_{model.name}"):
                    share = own.rows, own.members, options.temperature
                    used = own if own.tokens and warm else None
                    model.train_on(*share, used, sums, first_pass=first_pass)
        fresh, self._seen_version = batch.version != self._seen_version, batch.version
        metrics = batch_metrics(
            data,
            meter,
            critic_meter if self.critic is not None else None,
            corrections,
            options,
            same_weights=first_tokens if fresh else None,
            sum_ranks=self._sum_ranks,
        )
        metrics |= self._router_metrics(meter.steps)
        self._adapt_kl(data)
        totals = left_out(arrays.unfiltered, kept) | {
            "train/tokens": float(data.rows.lengths.sum() * options.actor.ppo_epochs),
            "actor/nonfinite_steps": float(meter.nonfinite + critic_meter.nonfinite),
            "actor/rejected_steps": float(rejected),
        }
        return StepReport(
            meter.steps,
            metrics,
            totals,
            meter.nonfinite + meter.empty,
            values=values,
        )

    def _arrays(self, batch: TrainBatch) -> BatchArrays:
        """Return the arrays of a batch. Raise MillraceError if it lacks the experts of R3."""
        arrays = arrays_of(batch, self.options.algorithm, self.options.teachers)
        if self.options.router_replay == "R3" and arrays.rows.experts is None:
            raise MillraceError(
                "model.router_replay=R3: the samples have no experts. "
                "Fix: model.router_replay=disabled, or a new run"
            )
        self._router_metrics()  # those of a warm-up
        return arrays

    def _router_metrics(self, steps: int = 0) -> dict[str, float]:
        """Return the metrics of the policy's routers over the last `steps` optimizer steps."""
        sums = self.actor.router_sums()
        return {} if sums is None else router_metrics(self._sum_ranks(sums).cpu(), steps)

    def _adapt_kl(self, data: Experience) -> None:
        """Change the coefficient of the KL in the rewards, if it is adaptive."""
        algorithm = self.options.algorithm
        ctrl = algorithm.kl_ctrl
        if algorithm.use_kl_in_reward and ctrl.type == "adaptive":
            target, horizon, count = ctrl.target_kl, ctrl.horizon, len(data.lengths)
            self.kl_coef = adapt(self.kl_coef, data.kl_to_reference, target, horizon, count)

    async def sft_step(self, examples: list[tuple[Tokens, ...]]) -> StepReport:
        """Take one optimizer step on (prompt, response, context, response, ...).

        The loss, sft/loss, is the mean of -log p over all response tokens, at temperature 1. The
        response should end with the end-of-sequence token. sft/grad_norm, sft/lr,
        sft/nonfinite_steps, sft/tokens and sft/pad_share are defined as in `step`. With sft.teacher,
        the loss is (1 - coef) x that mean + coef x sft/teacher_kl, the mean of KL(teacher, policy).
        """
        rows = rows_of_examples(examples)
        members = np.arange(len(rows.starts))
        tokens, sft = max(int(rows.trained_tokens.sum()), 1), self.options.sft
        of_teacher: Tensor | None = None
        if sft.teacher:
            rows, of_teacher = likeliest(self.teachers[sft.teacher], rows, sft.teacher_topk)

        def loss_of(outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Tensor]:
            loss = -outputs[0].sum() / tokens
            kl = torch.zeros_like(loss)
            if of_teacher is not None:
                own = torch.stack(outputs[2:], -1)
                kl = divergence(own, of_teacher[micro.source].to(own), forward=True).sum() / tokens
                loss = (1 - sft.teacher_coef) * loss + sft.teacher_coef * kl
            return loss, torch.stack([loss, kl]).detach().double()

        meter = Meter(("loss", "teacher_kl"))
        self.actor.accumulate(rows, members, 1.0, loss_of, meter)
        self.actor.optimizer_step(meter, first_pass=False)
        cells = self._sum_ranks(meter.cells()).cpu()
        metrics = meter.step_means("sft/") | {
            "sft/loss": meter.sums["loss"],
            "sft/pad_share": pad_share(cells),
        }
        if of_teacher is not None:
            metrics["sft/teacher_kl"] = meter.sums["teacher_kl"]
        totals = {
            "sft/tokens": float(rows.lengths.sum()),
            "sft/nonfinite_steps": float(meter.nonfinite),
        }
        return StepReport(1, metrics, totals, meter.nonfinite)

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        """Return log p of each trained token at the training temperature, for each trajectory."""
        rows = rows_of_samples(samples)
        flat = self.actor.tokens(rows, temperature=self.options.temperature)[0]
        return [part.tolist() for part in flat.split(rows.trained_of_trajectories.tolist())]

    async def reference_log_probs(
        self, samples: tuple[Sample, ...], seconds: float, eight_bit: bool = False
    ) -> list[list[list[float]]]:
        """Read `samples` with transformers' own model on rank 0, if it has room there."""
        rows, own = rows_of_samples(samples), self.options.model
        flat = reference.log_probs_and_ranks(
            self.model_folder,
            self.full_weights(),
            rows,
            self.options.temperature,
            dtype=reference.wider(DTYPES[own.dtype]),
            device=self.device,
            trust_remote_code=own.trust_remote_code,
            computes=self.rank == 0,
            seconds=seconds,
            eight_bit=eight_bit,
        )
        flat = self._sum_ranks(flat).cpu()
        if not flat[0, -1].item():
            return []
        parts = flat[:, :-1].split(rows.trained_of_trajectories.tolist(), dim=1)
        return [part.tolist() for part in parts]

    async def displace(self, away: bool) -> None:
        if away != self._away:
            for weight in self.sent_weights():
                displace_(weight)
            self._away = away

    async def saved(self) -> None:
        """Wait until no state is being written."""
        await self.writer.done()

    def _sum_ranks(self, value: Tensor) -> Tensor:
        return self.actor.reduce(value.to(self.device), dist.ReduceOp.SUM)


def _named(seconds: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the parts that have a name.

    A GPU runs the update of an optimizer step after the host continues. Its last seconds therefore
    count for the next part.
    """
    return {name: value for name, value in seconds.items() if name != "other"}
