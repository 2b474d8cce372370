"""The devices of both sides together, and the nodes that they take."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config.rollout_keys import RolloutConfig
from millrace.config.trainer_keys import TrainerConfig


@dataclass(frozen=True, slots=True)
class Sides:
    """The training side and the rollout side.

    `colocated` says that they take turns on the same devices.
    """

    trainer: TrainerConfig
    rollout: RolloutConfig
    colocated: bool

    @property
    def share_nodes(self) -> bool:
        """Whether the devices of both sides fit together on one node."""
        both = self.trainer.n_gpus_per_node + self.rollout.n_gpus_per_node
        return self.colocated or both <= (self.trainer.gpus_in_node or 8)

    @property
    def devices(self) -> int:
        """Number of devices of both sides together."""
        both = (self.trainer.ranks, self.rollout.devices)
        return max(both) if self.colocated else sum(both)

    @property
    def nodes_needed(self) -> int:
        """The nodes of the larger side if the sides share nodes, else the sum of both."""
        nnodes = (self.trainer.nnodes, self.rollout.nnodes)
        return max(nnodes) if self.share_nodes else sum(nnodes)
