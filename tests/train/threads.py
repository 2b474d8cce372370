"""The same episode with more threads: each later turn begins a thread that reads the earlier ones."""

from __future__ import annotations

from dataclasses import replace

from millrace.ports import TrainBatch
from millrace.types import Author, Prompt, Segment, Thread, Trajectory, joined


def cut(prompt: Prompt, trajectory: Trajectory, *, whole_openings: bool = False) -> Trajectory:
    """Return the single thread of `trajectory` as one thread for each turn of the policy.

    Every trained token keeps its context. With `whole_openings`, the context of a later turn is the
    opening of its thread. Otherwise it is segments of the environment after the prompt.
    """
    (thread,) = trajectory.threads
    threads, before = [], list[Segment]()
    for segment in thread.segments:
        if segment.author is Author.POLICY:
            if whole_openings and before:
                parts = [prompt.tokens, *(s.tokens for s in before)]
                threads.append(Thread((segment,), joined(parts)))
            else:
                threads.append(Thread((*before, segment)))
        before.append(Segment(segment.tokens, Author.ENVIRONMENT))
    return replace(trajectory, threads=tuple(threads))


def cut_batch(batch: TrainBatch, *, whole_openings: bool = False) -> TrainBatch:
    return replace(
        batch,
        samples=tuple(
            replace(
                sample,
                trajectories=tuple(
                    cut(sample.prompt, t, whole_openings=whole_openings)
                    for t in sample.trajectories
                ),
            )
            for sample in batch.samples
        ),
    )
