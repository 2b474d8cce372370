"""The node and the devices of each worker: pure arithmetic on the sizes of nodes.

A plan places both sides on nodes. Both sides have the first `shared` nodes in common. Colocated
sides share the devices too: trainer rank i and rollout device i are the same device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace.config import Sides, TrainerConfig
from millrace.errors import ConfigError, bad_value


@dataclass(frozen=True, slots=True)
class Plan:
    """Nodes for both sides, numbered from 0: the trainer's nodes, then the rollout-only nodes."""

    sides: Sides
    shared: int

    @property
    def shares(self) -> list[int]:
        """The number of devices on each node."""
        t, r = self.sides.trainer, self.sides.rollout
        both = t.n_gpus_per_node + (0 if self.sides.colocated else r.n_gpus_per_node)
        alone = [t.n_gpus_per_node] * (t.nnodes - self.shared) + [r.n_gpus_per_node] * (
            r.nnodes - self.shared
        )
        return [both] * self.shared + alone

    def place(self, role: str, index: int) -> tuple[int, slice]:
        """Return a worker's node, and the worker's devices among that node's share."""
        t, r = self.sides.trainer, self.sides.rollout
        if role == "trainer":
            node, device = divmod(index, t.n_gpus_per_node)
            return node, slice(device, device + 1)
        each = r.tensor_model_parallel_size
        node, device = divmod(index * each, r.n_gpus_per_node)
        if node >= self.shared:
            node += t.nnodes - self.shared
        elif not self.sides.colocated:
            device += t.n_gpus_per_node
        return node, slice(device, device + each)


def threads(trainer: TrainerConfig, cores: int, devices: int) -> int:
    """Return the torch threads of each worker on a node with `cores` and `devices` in use.

    Sides that share devices take turns, and each uses all its cores in its turn.
    """
    if trainer.threads:
        return trainer.threads
    return 1 if trainer.deterministic else max(1, cores // devices)


def plans(sides: Sides) -> list[Plan]:
    """Return the plans that the configuration allows, those with the fewest nodes first.

    If trainer.gpus_in_node is set, there is exactly one plan.
    """
    most = min(sides.trainer.nnodes, sides.rollout.nnodes)
    if sides.trainer.gpus_in_node or sides.colocated:
        return [Plan(sides, most if sides.share_nodes else 0)]
    return [Plan(sides, shared) for shared in range(most, -1, -1)]


def choose(sides: Sides, kind: str, sizes: Sequence[float], free: Sequence[float]) -> Plan:
    """Return the plan for nodes that have `sizes` devices, of which `free` are free.

    Raise ConfigError if no plan fits even when all devices are free.
    """
    possible = [plan for plan in plans(sides) if _fits(plan.shares, sizes)]
    if not possible:
        raise refusal(
            sides, kind, f"the cluster's nodes have {_list(sizes)}", "fewer devices, or more nodes"
        )
    return next((plan for plan in possible if _fits(plan.shares, free)), possible[0])


def refusal(sides: Sides, kind: str, available: str, fix: str) -> ConfigError:
    """Return the error with the devices that the run needs, those available, and the fix."""
    t, r = sides.trainer, sides.rollout
    allowed = plans(sides)
    ways = [
        f"{len(p.shares)} node{'s' * (len(p.shares) > 1)} with {_list(p.shares)}" for p in allowed
    ]
    needs = f"{ways[0]} {kind}s" + (
        f" (to {ways[-1]}, where the sides share none)" if len(ways) > 1 else ""
    )
    rule = (
        f"trainer {t.nnodes} x {t.n_gpus_per_node} and rollout {r.nnodes} x {r.n_gpus_per_node} "
        f"devices need {needs}; {available}"
    )
    return bad_value("trainer.nnodes", t.nnodes, rule, fix)


def _fits(shares: Iterable[float], sizes: Iterable[float]) -> bool:
    """Return whether each share fits on a node of its own.

    It is enough to try the largest share on the largest node, the second on the second, and so on.
    """
    needed, present = sorted(shares, reverse=True), sorted(sizes, reverse=True)
    return len(needed) <= len(present) and all(
        share <= size for share, size in zip(needed, present, strict=False)
    )


def _list(numbers: Iterable[float]) -> str:
    return ", ".join(f"{int(n)}" for n in sorted(numbers, reverse=True)) or "none"
