"""Conformance suites for implementations of a port: embedded, remote or third-party.

`asyncio.run(check_rollout_engine(make))` raises AssertionError with the first failure. Each check
creates its own engine.

    port                                suite
    RolloutEngine                       check_rollout_engine
    Replica (and ReplicaSleeper)        check_replica
    TrainEngine                         check_train_engine
    TrainEngine and Sleeper             check_sleeping_train_engine
"""

from millrace.testing.rollouts import RolloutCase, check_replica, check_rollout_engine, joined
from millrace.testing.training import (
    SleepingTrainEngine,
    TrainCase,
    check_sleeping_train_engine,
    check_train_engine,
    train_samples,
)

__all__ = [
    "RolloutCase",
    "SleepingTrainEngine",
    "TrainCase",
    "check_replica",
    "check_rollout_engine",
    "check_sleeping_train_engine",
    "check_train_engine",
    "joined",
    "train_samples",
]
