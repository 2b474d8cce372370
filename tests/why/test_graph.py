"""The graph of waits as a pure function: roots, circles, meetings, and who moves."""

from __future__ import annotations

import random

import pytest

from millrace.waits.answer import Acted, Process, ProcessStatus, Waited, collective_in
from millrace.waits.graph import Graph, roots
from millrace.waits.verdict import Verdict, judge, report


def drawn(seed: int) -> tuple[list[ProcessStatus], dict[str, list[str]]]:
    """Return answers with random waits among the driver's actors, and the waits by name."""
    dice = random.Random(seed)
    names = [f"actor {k}" for k in range(dice.randint(1, 12))]
    waits = {n: dice.sample(names, dice.randint(0, min(2, len(names)))) for n in names}
    waits = {n: [w for w in heads if w != n] for n, heads in waits.items()}
    waited = [Waited(n, head, "it", 99.0) for n, heads in waits.items() for head in heads]
    acted = [Acted(n, "", 99.0) for n in names]
    return [ProcessStatus("driver", 1, waits=waited, actors=acted)], waits


@pytest.mark.parametrize("seed", range(60))
def test_every_waiter_reaches_a_root_and_no_root_waits_outside_of_itself(seed: int) -> None:
    answers, waits = drawn(seed)
    found = roots(Graph(answers), 1.0)
    inside = [{n.name for n in root.nodes} for root in found]
    for circle in inside:
        assert all(head in circle for name in circle for head in waits.get(name, []))
    reached = {n for circle in inside for n in circle}
    for name, heads in waits.items():
        seen, left = {name}, [name]
        while left:
            for head in waits[left.pop()]:
                if head not in seen:
                    seen.add(head)
                    left.append(head)
        assert not heads or seen & reached


def rank(number: int, passes: int, what: str, stack: str, seconds: float = 184.0) -> ProcessStatus:
    work = Waited("engine.step", "", what, seconds, work=True)
    progress = {"passes": (float(passes), seconds)}
    stacks = {"MainThread": ["/x/train.py:1 step", stack]}
    actors = [Acted("engine.step", "", 200.0)]
    return ProcessStatus(f"trainer-{number}", number, "", [work], actors, progress, 0.0, stacks)


def trainer(*whom: str) -> ProcessStatus:
    waits = [Waited("trainer", name, "engine.step", 190.0) for name in whom]
    more = Waited("rollouter", "trainer", "a free slot", 190.0)
    actors = [Acted("trainer", "", 900.0), Acted("rollouter", "", 900.0)]
    return ProcessStatus("driver", 9, "", [*waits, more], actors, {"moves": (5.0, 190.0)})


IN = "/torch/distributed/distributed_c10d.py:9 all_reduce"


@pytest.mark.parametrize("stuck", range(4))
@pytest.mark.parametrize("late", ["at work", "in an earlier collective"])
def test_the_rank_that_lags_is_the_culprit(stuck: int, late: str) -> None:
    """The others wait in an all-reduce inside of the same backward pass."""
    names = [f"trainer-{r}" for r in range(4)]
    ranks = [rank(r, 6, "backward of micro-batch 7", IN) for r in range(4)]
    if late == "at work":
        ranks[stuck] = rank(stuck, 6, "backward of micro-batch 7", "/x/model.py:7 forward")
    else:
        ranks[stuck] = rank(stuck, 5, "backward of micro-batch 6", IN)
    verdict = judge([trainer(*names), *ranks])
    batch = 7 if late == "at work" else 6
    assert verdict.sentence == (
        f"trainer rank {stuck} has been in backward of micro-batch {batch} for 184 s; "
        "everyone else waits for its all_reduce."
    )
    assert (
        verdict.chain[-1].startswith("trainer")
        and verdict.culprit == f"trainer-{stuck}/engine.step"
    )


def test_ranks_that_have_all_come_wait_for_the_network() -> None:
    ranks = [rank(r, 6, "backward of micro-batch 7", IN) for r in range(2)]
    verdict = judge([trainer("trainer-0", "trainer-1"), *ranks])
    assert verdict.kind == "network" and "all have come to all_reduce" in verdict.sentence


@pytest.mark.parametrize(
    ("process", "kind", "says"),
    [
        (Process(7, "T"), "stopped", "a signal or a debugger stopped it"),
        (Process(7, "D", "folio_wait_bit"), "kernel", "folio_wait_bit (state D)"),
        (Process(7, "R", "", 1.0), "locked", "computes with 100% of a core"),
        (Process(7, "S", "futex_wait"), "silent", "sleeps in futex_wait"),
    ],
)
def test_the_kernel_speaks_for_a_process_that_is_silent(
    process: Process, kind: str, says: str
) -> None:
    silent = ProcessStatus("rollout-1", 7, "node-3", silent=True, process=process)
    waits = [Waited("sample 4", "rollout-1", "engine.generate", 60.0)]
    driver = ProcessStatus(
        "driver", 1, "", waits, [Acted("sample 4", "", 60.0)], {"moves": (1.0, 60.0)}
    )
    verdict = judge([driver, silent])
    assert verdict.kind == kind and says in verdict.sentence
    assert "rollout-1 (process 7 on node-3)" in verdict.sentence and verdict.sentence in report(
        verdict
    )


def test_the_report_on_a_run_that_is_over_has_no_empty_sections() -> None:
    assert report(Verdict("over", "the run is over.")) == "the run is over.\n"


def test_a_replica_that_stands_still_is_named_while_the_others_move() -> None:
    waits = [
        Waited("sample 1", "rollout-0", "engine.generate", 0.5),
        Waited("sample 2", "rollout-1", "engine.generate", 60.0, 4),
    ]
    acted = [Acted("sample 1", "", 0.5), Acted("sample 2", "", 60.0)]
    serves = [Acted("engine.generate", "", 60.0)]
    answers = [
        ProcessStatus("driver", 1, "", waits, acted, {"moves": (9.0, 0.2)}),
        ProcessStatus("rollout-0", 2, "", [], serves, {"tokens": (500.0, 0.1)}),
        ProcessStatus("rollout-1", 3, "", [], serves, {"tokens": (200.0, 58.0)}),
    ]
    verdict = judge(answers)
    assert verdict.state == "moving" and len(verdict.others) == 1
    assert verdict.others[0].startswith("rollout-1 has served engine.generate for 60 s")


def test_a_collective_is_read_from_the_stacks() -> None:
    assert collective_in({"MainThread": ["/a.py:1 f", IN]}) == "all_reduce"
    assert collective_in({"MainThread": ["/a.py:1 f", "/b.py:2 g"]}) == ""
    waits = ["/millrace/train/learner.py:130 _clip_and_step"]
    assert collective_in({"MainThread": waits}) == "sum over all ranks"


def test_who_waits_for_a_replica_waits_for_its_stopped_core() -> None:
    waits = [Waited("sample 4", "rollout-0", "engine.generate", 60.0)]
    serves = [Acted("engine.generate", "", 60.0)]
    core = ProcessStatus("rollout-0-core-0", 7, silent=True, process=Process(7, "T"))
    driver = ProcessStatus(
        "driver", 1, "", waits, [Acted("sample 4", "", 60.0)], {"moves": (1.0, 60.0)}
    )
    verdict = judge([driver, ProcessStatus("rollout-0", 2, "", [], serves), core])
    assert (
        verdict.culprit == "rollout-0-core-0" and "everyone else waits for it" in verdict.sentence
    )
