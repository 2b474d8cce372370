"""The state that a run starts from."""

from __future__ import annotations

from millrace.pipeline.checkpoint import read_ledger
from millrace.run.session import Session
from millrace.run.sft import warm_up
from millrace.run.starts import WARM_UP
from millrace.schedule.ledger import Ledger
from millrace.waits.registry import starting


async def start_state(s: Session) -> Ledger:
    """Load or make the weights that training starts from, and return their ledger.

    The weights are those of a checkpoint, or the warmed-up ones.
    """
    derived = s.derived
    if s.run.resume_from is not None:
        s.progress.note(f"resuming from {s.run.resume_from}")
        await s.engines.train.begin("rl", derived.lr_horizon)
        await s.engines.train.load(str(s.run.resume_from / "engine"))
        snapshot = read_ledger(s.run.resume_from)
        ledger = Ledger.restore(s.config.schedule, snapshot, derived.samples)
        if ledger.retired >= derived.samples:
            s.progress.note(
                f"nothing is left to train: the checkpoint has all {derived.samples} samples of "
                "the run"
            )
        return ledger
    ledger = Ledger(s.config.schedule, derived.samples)
    if s.config.sft.steps:
        with starting(WARM_UP):
            await warm_up(s)
    await s.engines.train.begin("rl", derived.lr_horizon)
    if s.config.sft.steps:  # a run that is killed after this does not repeat the warm-up
        s.checkpoints.supersede(-1)
        await s.checkpoints.save(ledger.snapshot(), s.engines.train)
    return ledger
