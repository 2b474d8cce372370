"""The rollout side that a configuration makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.config import Config
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.sample_queue import SampleQueue
from millrace.rollout.episode import SingleTurn
from millrace.rollout.shaping import OverlongBuffer
from millrace.run.teachers import OutsideTeachers
from millrace.run.train import make_rollouter
from millrace.schedule.ledger import Ledger


def made(whole_group: bool = False, **sections: Any) -> Rollouter:
    config = Config.model_validate({"rollout": {"n": 4, "max_response_length": 100}, **sections})
    session: Any = SimpleNamespace(
        config=config,
        problems=SimpleNamespace(
            train=SimpleNamespace(where=str), chat=SimpleNamespace(decode=str)
        ),
        engines=SimpleNamespace(pool=None),
        reward=SimpleNamespace(whole_group=whole_group),
        agent=SingleTurn(),
        teachers=OutsideTeachers(),
        curriculum=None,
    )
    queue = SampleQueue(Ledger(config.schedule), deadline_s=1.0)
    return make_rollouter(session, queue, session.engines.pool)


def test_by_default_there_is_no_shaping_no_filter_and_no_baseline() -> None:
    rollouter = made()
    assert rollouter.roller.overlong is None and rollouter.dynamic_sampling is None
    assert not rollouter.roller.greedy_baseline and rollouter.roller.num_responses == 4
    assert not rollouter.roller.whole_group


def test_a_function_that_asks_for_whole_groups_gets_them() -> None:
    assert made(whole_group=True).roller.whole_group


def test_the_overlong_buffer_ends_at_the_longest_response() -> None:
    rollouter = made(
        reward={
            "overlong_buffer": {"enable": True, "len": 20, "penalty_factor": 0.5},
            "max_error_share": 0.4,
        }
    )
    assert (
        rollouter.roller.overlong == OverlongBuffer(100, 20, 0.5)
        and rollouter.max_error_share == 0.4
    )


def test_dynamic_sampling_counts_in_the_schedules_windows() -> None:
    groups = {"enable": True, "metric": "acc", "max_num_gen_batches": 3}
    sampling = made(
        algorithm={"filter_groups": groups}, actor={"ppo_mini_batch_size": 6}
    ).dynamic_sampling
    assert sampling is not None and (
        sampling.metric,
        sampling.max_num_gen_batches,
        sampling.window,
    ) == ("acc", 3, 6)


@pytest.mark.parametrize(("estimator", "responses"), [("remax", 5), ("rloo", 4)])
def test_remax_alone_draws_a_greedy_baseline(estimator: str, responses: int) -> None:
    assert made(algorithm={"adv_estimator": estimator}).roller.num_responses == responses
