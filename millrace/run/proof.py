"""The proof of a run's engines, from its configuration, and the end of a run whose engines disagree."""

from __future__ import annotations

from millrace.errors import GapError
from millrace.observe import gap
from millrace.observe.guard import CAUSES
from millrace.pipeline.proof import Limits, Proof
from millrace.pipeline.rollouter import Rollouter
from millrace.run.session import Session
from millrace.run.stop import StopRequest


def make_proof(s: Session, rollouter: Rollouter, stop: StopRequest) -> Proof:
    """Return what proves the engines of a run."""
    c, engines, replicas = s.config, s.engines, rollouter.roller
    dtype = c.rollout.quantization or c.model.dtype
    limits = Limits(
        dtype,
        least_limit(c.trainer.device, dtype),
        c.rollout.max_len,
        c.schedule.capacity * replicas.num_responses,
        c.guard.max_log_prob_gap,
        c.guard.max_quantization_gap if c.rollout.quantization else None,
    )
    return Proof(
        *(engines.train, engines.pool, engines.sync, engines.turns, s.problems.train),
        *(replicas.params, c.schedule, limits),
        incarnation=lambda: engines.train.incarnation,
        note=s.progress.note,
        refuse=lambda error: refuse(s, stop, error),
        stops=c.guard.on_gap == "stop",
    )


def least_limit(device: str, dtype: str) -> float:
    """Return the smallest limit of a gap. Floors of small models are too small to be measured."""
    from millrace.runtime.local import visible_gpus

    on_gpu = device == "cuda" or (device == "auto" and bool(visible_gpus()))
    return gap.LEAST_TF32 if on_gpu and dtype == "float32" else gap.LEAST[dtype]


def of_version(figures: str, quantization: str | None) -> GapError:
    """Return the error of a version whose engines disagree."""
    coarse = f"rollout.quantization={quantization} is too coarse for what the policy became"
    causes = [
        *([coarse] if quantization else []),
        "a jump since the proof: old KV, graphs or kernels",
        CAUSES["log_prob_gap"].rstrip("."),
    ]
    return gap.disagreement(figures, causes)


def refuse(s: Session, stop: StopRequest, error: GapError) -> None:
    """Stop a run whose engines disagree, as a signal would. It saves a checkpoint, and then fails."""
    if s.config.guard.on_gap == "warn":
        s.progress.note(f"warning: {error}")
    elif stop.error is None:
        stop.error = error
        stop.request()
