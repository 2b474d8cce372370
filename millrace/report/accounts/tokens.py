"""The account of tokens: every token that an engine draws is in exactly one bucket.

| bucket | the tokens of |
|---|---|
| trained | trajectories whose version is live, without the next two |
| rejected | the same, where an off-policy correction removed the token from the loss |
| filtered | the same, where overlong_filtering removed the token from the loss |
| dead | turns of agents that nobody received, or that another draw replaced |
| cancelled | requests that were cancelled, by an agent or with a failed sample |
| baseline | greedy responses, whose scores are a baseline (remax) |
| dropped/REASON | samples that were dropped |
| evaluated | validations, and proofs of the engines |
| regenerated | requests and trajectories that a stop threw away; the resumed run draws them again |
| lost | an attempt that was killed, after the checkpoint, that no journal had |
| held | samples in a slot, and requests that run |
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from millrace.ports import RolloutStats
from millrace.schedule.ledger import LedgerSnapshot, Slot
from millrace.waits.stream import Event

PREFIX = "tokens/"
"""The buckets have this prefix among the counts of a checkpoint."""

VALIDATION = "val/"
"""The sessions of a validation have this prefix."""


class TokenAccount:
    """A watcher. It counts the tokens of every request until their sample leaves its slot."""

    names = frozenset({"request", "stats", "dropped", "stepped", "published", "recalled"})

    def __init__(
        self,
        counts: Mapping[str, float] | None = None,
        slots: Iterable[tuple[int, Slot]] = (),
        generated: int = 0,
    ) -> None:
        """Continue the account of a checkpoint.

        `counts` has its counts, `slots` its samples. `generated` is the total that earlier attempts
        have recorded. What they drew after the checkpoint is lost.
        """
        self.buckets: Counter[str] = Counter()
        for name, count in (counts or {}).items():
            if name.startswith(PREFIX):
                self.buckets[name.removeprefix(PREFIX)] = int(count)
        self._in_slots = {sample_id: tokens_of_slot(slot) for sample_id, slot in slots}
        self._dropped: dict[int, tuple[str, int]] = {}
        """Reason and tokens of every sample that was dropped since the last version."""
        self._steps: deque[tuple[int, Counter[str]]] = deque()
        """The first sample of each step that is not live, and the step's tokens by bucket."""
        self._start: dict[str, RolloutStats] = {}
        self._now: dict[str, RolloutStats] = {}
        known = self.buckets.total() + sum(self._in_slots.values())
        self.buckets["lost"] += max(0, generated - known)
        self._earlier = max(generated, known)
        self._returned = self._cancelled = 0
        """Tokens of this attempt that a request returned, and those of cancelled requests."""

    def __call__(self, event: Event) -> None:
        if event.name == "request":
            if event.phase == "begin":
                return
            tokens, sample = event.facts.get("tokens", 0), event.key.partition("/")[0]
            self._returned += tokens
            if event.key.startswith(VALIDATION):
                self.buckets["evaluated"] += tokens
            else:
                self._in_slots[int(sample)] = self._in_slots.get(int(sample), 0) + tokens
        elif event.name == "stats":
            new: RolloutStats = event.facts["stats"]
            self._start.setdefault(event.track, new)
            known = self._now.get(event.track, new)
            self.buckets["cancelled"] += new.cancelled_tokens - known.cancelled_tokens
            self._cancelled += new.cancelled_tokens - known.cancelled_tokens
            self._now[event.track] = new
        elif event.name == "dropped":
            sample_id = int(event.key)
            reason, tokens = event.facts["reason"], self._in_slots.pop(sample_id, 0)
            self._dropped[sample_id] = reason, tokens
            self.buckets[f"dropped/{reason}"] += tokens
        elif event.name == "recalled":
            # What the journal has of a sample. It may be more than earlier lines recorded.
            sample_id, tokens = int(event.key), event.facts["tokens"]
            found = max(0, tokens - self._in_slots.get(sample_id, 0))
            self._in_slots[sample_id] = self._in_slots.get(sample_id, 0) + found
            recorded = min(found, self.buckets["lost"])
            self.buckets["lost"] -= recorded
            self._earlier += found - recorded
        elif event.name == "stepped":
            self._add_step(event)
        elif event.name == "published":
            self._publish(set(event.facts["ids"]))

    def _add_step(self, event: Event) -> None:
        samples, totals = event.facts["samples"], event.facts["report"].totals
        step: Counter[str] = Counter()
        for bucket in ("rejected", "filtered"):
            step[bucket] = int(totals.get(f"train/{bucket}_tokens", 0))
        for sample in samples:
            step["trained"] += sum(t.num_policy_tokens for t in sample.trajectories)
            step["dead"] += sum(t.dead_tokens for t in sample.trajectories)
            if sample.greedy is not None:
                step["baseline"] += sample.greedy.num_policy_tokens
                step["dead"] += sample.greedy.dead_tokens
        step["trained"] -= step["rejected"] + step["filtered"]
        self._steps.append((samples[0].prompt.index, step))

    def _publish(self, ids: set[int]) -> None:
        drawn = sum(self._in_slots.pop(sample_id, 0) for sample_id in ids)
        live: Counter[str] = Counter()
        # With overlap_sync, the first steps of the next version come before this event.
        while self._steps and self._steps[0][0] in ids:
            live += self._steps.popleft()[1]
        self.buckets += live
        self.buckets["regenerated"] += drawn - live.total()
        self._dropped.clear()

    @property
    def generated(self) -> int:
        """Return the tokens that were drawn so far, over all attempts.

        A token counts when its engine reports it or when its request returns.
        """
        reported = sum(now.tokens - self._start[track].tokens for track, now in self._now.items())
        return self._earlier + max(reported, self._returned + self._cancelled)

    def read(self) -> int:
        """Return the tokens that this attempt has read into KV caches."""
        last, first = self._now.values(), (self._start[track] for track in self._now)
        return sum(s.prefill_tokens for s in last) - sum(s.prefill_tokens for s in first)

    def totals(self) -> dict[str, int]:
        """Return every bucket that has tokens. They add up to `generated`."""
        held = self.generated - self.buckets.total()
        return dict(self.buckets + Counter(held=held))

    def counts(self, snapshot: LedgerSnapshot) -> dict[str, float]:
        """Return the counts for the checkpoint of `snapshot`.

        The samples of its slots are held there, also those that were dropped since then.
        """
        buckets = self._buckets_at(snapshot)
        return {f"{PREFIX}{name}": float(count) for name, count in buckets.items()}

    def _buckets_at(self, snapshot: LedgerSnapshot) -> Counter[str]:
        """Return the buckets without the samples that were dropped after `snapshot`."""
        slots, buckets = dict(snapshot.slots), Counter(self.buckets)
        for sample_id, (reason, tokens) in self._dropped.items():
            if sample_id in slots or sample_id >= snapshot.admitted:
                buckets[f"dropped/{reason}"] -= tokens
        return buckets

    def end(self, snapshot: LedgerSnapshot) -> None:
        """Settle the account of an attempt that ended in order. No request runs any more.

        The last checkpoint has the samples of `snapshot`. All other tokens are thrown away.
        """
        self.buckets = self._buckets_at(snapshot)
        self._dropped.clear()
        held = sum(tokens_of_slot(slot) for _, slot in snapshot.slots)
        self.buckets["regenerated"] += self.generated - self.buckets.total() - held


def tokens_of_slot(slot: Slot) -> int:
    """Return the policy's tokens that a checkpoint has of one slot."""
    trajectories = slot.progress
    if slot.sample is not None:
        trajectories = slot.sample.trajectories
        trajectories += () if slot.sample.greedy is None else (slot.sample.greedy,)
    return sum(t.num_policy_tokens + t.dead_tokens for t in trajectories)
