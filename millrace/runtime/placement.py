"""Which devices of which node a worker gets: pure arithmetic on the sizes of nodes.

A plan lays both sides over nodes; the first `shared` nodes of each side are the same ones. Colocated sides share the devices
themselves: trainer rank i and rollout device i are one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace.config import Sides, TrainerConfig
from millrace.errors import ConfigError, bad_value


@dataclass(frozen=True, slots=True)
class Plan:
    """Nodes for both sides, numbered from 0: the trainer's, then those that only rollouts are on."""

    sides: Sides
    shared: int

    @property
    def shares(self) -> list[int]:
        """Devices of each node."""
        t, r = self.sides.trainer, self.sides.rollout
        both = t.n_gpus_per_node + (0 if self.sides.colocated else r.n_gpus_per_node)
        alone = [t.n_gpus_per_node] * (t.nnodes - self.shared) + [r.n_gpus_per_node] * (
            r.nnodes - self.shared
        )
        return [both] * self.shared + alone

    def place(self, role: str, index: int) -> tuple[int, slice]:
        """The node of a worker, and its devices among that node's share."""
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
    """Torch threads of each worker on a node with so many cores, and workers on so many devices of it. Sides that share devices take turns:
    each has all of its cores in its turn.
    """
    if trainer.threads:
        return trainer.threads
    return 1 if trainer.deterministic else max(1, cores // devices)


def plans(sides: Sides) -> list[Plan]:
    """The plans that the configuration allows, those with fewest nodes first. trainer.gpus_in_node leaves one."""
    most = min(sides.trainer.nnodes, sides.rollout.nnodes)
    if sides.trainer.gpus_in_node or sides.colocated:
        return [Plan(sides, most if sides.share_nodes else 0)]
    return [Plan(sides, shared) for shared in range(most, -1, -1)]


def choose(sides: Sides, kind: str, sizes: Sequence[float], free: Sequence[float]) -> Plan:
    """The plan for nodes that have `sizes` devices, of which `free` are free. Raises ConfigError if no wait would place one."""
    possible = [plan for plan in plans(sides) if _fits(plan.shares, sizes)]
    if not possible:
        raise refusal(
            sides, kind, f"the cluster's nodes have {_list(sizes)}", "fewer devices, or more nodes"
        )
    return next((plan for plan in possible if _fits(plan.shares, free)), possible[0])


def refusal(sides: Sides, kind: str, found: str, fix: str) -> ConfigError:
    """What is needed, what was found, and the fix."""
    t, r = sides.trainer, sides.rollout
    allowed = plans(sides)
    ways = [
        f"{len(p.shares)} node{'s' * (len(p.shares) > 1)} with {_list(p.shares)}" for p in allowed
    ]
    needs = f"{ways[0]} {kind}s" + (
        f" (to {ways[-1]}, where the sides share none)" if len(ways) > 1 else ""
    )
    rule = f"trainer {t.nnodes} x {t.n_gpus_per_node} and rollout {r.nnodes} x {r.n_gpus_per_node} devices need {needs}; {found}"
    return bad_value("trainer.nnodes", t.nnodes, rule, fix)


def _fits(shares: Iterable[float], sizes: Iterable[float]) -> bool:
    """Whether each share has a node of its own: the largest shares on the largest nodes show it, if anything does."""
    wanted, have = sorted(shares, reverse=True), sorted(sizes, reverse=True)
    return len(wanted) <= len(have) and all(w <= h for w, h in zip(wanted, have, strict=False))


def _list(numbers: Iterable[float]) -> str:
    return ", ".join(f"{int(n)}" for n in sorted(numbers, reverse=True)) or "none"
