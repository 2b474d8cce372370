"""The verdict on a run: one sentence that names the culprit, what to do next, and a report.

A watch decides that a run stands still, and saves what all processes say.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from millrace.waits.answer import ProcessStatus
from millrace.waits.graph import DRIVER, LATE_S, NETWORK, NOBODY, Edge, Graph, Node, Root, roots

PATIENCE_S = 10.0
"""Seconds without progress after which something stands still."""
_MOST_LINES = 40
MOST_FILES = 10
"""Stalls of a run that are saved."""

STOPPED, DEAD, KERNEL, LOCKED, SILENT, LOOP, CIRCLE, NETWORK_, NOBODY_, OUTSIDE, WORK, IDLE = (
    *("stopped", "dead", "kernel", "locked", "silent", "loop", "circle", "network", "nobody"),
    *("outside", "work", "idle"),
)
NEXT = {
    STOPPED: "find who sent the signal; `kill -CONT PID` lets it continue",
    DEAD: "read its log in RUN/logs; `trainer.resume=auto` continues the run",
    KERNEL: "check the disk, the network file system or the GPU that it waits for",
    LOCKED: "look at what it computes, with the stacks of its children; a C function holds Python's lock",
    SILENT: "look at its log in RUN/logs, and end the run if it does not answer again",
    LOOP: "move this call out of the event loop: the frame above blocks every task of the process",
    CIRCLE: "this is a bug of millrace: report it with the saved files, then stop and resume the run",
    NETWORK_: "check the network between the nodes (NCCL_DEBUG=INFO), then stop and resume the run",
    NOBODY_: "this is a bug of millrace: report it with the saved files, then stop and resume the run",
    OUTSIDE: "look at that program; a deadline ends such a wait: reward.timeout_s, "
    "agents.tool_deadline_s, agents.deadline_s, teachers.NAME.timeout_s",
    WORK: "read its stack, with --full or in the saved report; if it is the same in a minute, "
    "stop and resume the run",
    IDLE: "the call or its answer was lost: check the network, then stop and resume the run",
}
"""What to do next, by the kind of culprit."""


class Verdict(msgspec.Struct):
    """The culprit that holds a run up."""

    state: str
    """"moving", "still", "starting", "over", "dead" or "unknown"."""
    sentence: str
    next: str = ""
    culprit: str = ""
    kind: str = ""
    seconds: float = 0.0
    """For how long the culprit has been stuck."""
    waiters: int = 0
    chain: list[str] = []
    """From the trainer to the culprit."""
    others: list[str] = []
    """What else stands still while the run moves."""
    answers: list[ProcessStatus] = []


def judge(answers: Sequence[ProcessStatus], patience_s: float = PATIENCE_S) -> Verdict:
    """Return the verdict on the answers of all processes of a run."""
    graph = Graph(answers)
    found = roots(graph, patience_s)
    stills = [still for a in answers if (still := a.still_s) is not None]
    # At the start nothing is counted yet.
    quiet = min(stills, default=max((r.seconds for r in found), default=0.0))
    # The counters of the other processes may move for a moment after one has stopped.
    stuck = [r for r in found if not r.moving]
    moving = quiet < patience_s
    verdict = Verdict("moving" if moving else "still", "nobody waits", answers=list(answers))
    if not found:
        return verdict
    root = (stuck or found)[0]
    kind = kind_of(root)
    names = [n.name for n in root.nodes]
    names.sort(key=lambda name: name not in ("trainer", "rollouter", "sync"))
    verdict.culprit = " and ".join(names[:3]) + (" and others" if len(names) > 3 else "")
    verdict.kind = kind
    verdict.seconds, verdict.waiters = root.seconds, root.waiters
    verdict.chain = chain_to(graph, root)
    verdict.next = NEXT[kind].replace(
        "PID", str(root.nodes[0].answer.pid if root.nodes[0].answer else "")
    )
    sentence = f"{says(root, kind)}{_at_work(graph, root)}{_waiters(graph, root)}"
    if moving:
        verdict.others = [f"{says(r, kind_of(r))}{_waiters(graph, r)}" for r in stuck]
        verdict.sentence = f"the run moves. {mostly(graph, found)}".strip()
        if not stuck:
            verdict.next = ""
    else:
        ledger = next((a.facts["ledger"] for a in answers if "ledger" in a.facts), "")
        tail = f" Ledger: {ledger}." if ledger and kind in (CIRCLE, NOBODY_) else ""
        verdict.sentence = f"{sentence}.{tail}"
    return verdict


def kind_of(root: Root) -> str:
    """Return the kind of a culprit."""
    node, answer = root.nodes[0], root.nodes[0].answer
    if len(root.nodes) > 1:
        return CIRCLE
    if answer is None:
        if node.name.startswith(NETWORK):
            return NETWORK_
        return NOBODY_ if node.name.startswith(NOBODY) else OUTSIDE
    if answer.dead:
        return DEAD
    if answer.silent and (process := answer.process) is not None:
        states = {"T": STOPPED, "t": STOPPED, "Z": DEAD, "X": DEAD, "D": KERNEL}
        return states.get(process.state, LOCKED if process.computes else SILENT)
    if answer.silent:
        return SILENT
    if answer.name == DRIVER and node.is_process and answer.late_s >= LATE_S:
        return LOOP
    return IDLE if node.is_process else WORK


def says(root: Root, kind: str) -> str:
    """Return what the culprit does, or does not do."""
    node, answer = root.nodes[0], root.nodes[0].answer
    name, seconds = called(node), f"{root.seconds:.0f} s"
    wait = max((e.wait for e in root.reasons if e.wait), key=lambda w: w.seconds, default=None)
    what = wait.what if wait is not None else "its turn"
    if kind == CIRCLE:
        inside = {n.name for n in root.nodes}
        waits = [e for e in root.reasons if e.tail in inside]
        waits.sort(key=lambda e: (e.tail not in ("trainer", "rollouter", "sync"), e.tail))
        texts = [
            f"{e.tail} has waited {e.wait.seconds:.0f} s for {e.wait.what}" for e in waits if e.wait
        ]
        texts = list(dict.fromkeys(texts))
        more = f" and {len(texts) - 2} more" if len(texts) > 2 else ""
        return f"{' and '.join(texts[:2])}{more}: each waits for the other"
    if answer is None:
        if kind == NETWORK_:
            return f"all have come to {what}, and it has not ended for {seconds}: {node.name}"
        if kind == NOBODY_:
            return f"nobody works on {what}, and it has been waited for since {seconds}"
        return f"{node.name} has not finished {what} for {seconds}"
    where = f" on {answer.host}" if answer.host else ""
    process = f"process {answer.pid}{where}"
    kernel = answer.process
    if kind == DEAD:
        return answer.dead or f"{name} ({process}) is dead"
    if kind == STOPPED:
        return f"{name} ({process}) is stopped: a signal or a debugger stopped it (state T)"
    if kind == KERNEL and kernel is not None:
        return f"{name} ({process}) waits in the kernel, in {kernel.wchan or 'a call'} (state D)"
    if kind == LOCKED and kernel is not None:
        share = f"{kernel.cpu_share:.0%} of a core"
        return f"{name} ({process}) does not answer, and computes with {share}"
    if kind == SILENT:
        at = f", and sleeps in {kernel.wchan}" if kernel is not None and kernel.wchan else ""
        return f"{name} ({process}) does not answer{at}"
    if kind == LOOP:
        # What the loop does, or what a task of it began last.
        newest = min((w for w in answer.waits if w.work), key=lambda w: w.seconds, default=None)
        newest = node.newest_work or newest
        by = f" ({newest.what})" if newest is not None else ""
        return f"the driver's event loop has stood still for {seconds} in {innermost(answer)}{by}"
    if kind == IDLE:
        return f"{name} does not serve {what}, which it was asked {seconds} ago"
    work = node.newest_work
    if work is not None:
        return f"{name} has been in {work.what} for {seconds}"
    still = answer.still_s
    if answer.name == DRIVER or still is None:
        return f"{name} has run for {seconds}, and it waits for nothing that is registered"
    served = node.name.partition("/")[2]
    return (
        f"{name} has served {served} for {seconds}, and nothing in it has moved for {still:.0f} s"
    )


def _at_work(graph: Graph, root: Root) -> str:
    """Return what the kernel says about a child process whose number is in the culprit's name."""
    _, _, number = root.nodes[0].name.rpartition(" ")
    for answer in graph.answers.values():
        for child in answer.children:
            if str(child.pid) == number:
                if child.computes:
                    return f" (it computes, with {child.cpu_share:.0%} of a core)"
                return f" (it is in state {child.state}, and does not compute)"
    return ""


def called(node: Node) -> str:
    """Return the name of a node in a sentence: "trainer rank 3", "rollout-1", "sample 17"."""
    if node.answer is None or node.answer.name == DRIVER:
        return "the driver" if node.name == DRIVER else f"the {node.name}" if node.name in (
            "trainer", "rollouter", "sync", "validation", "checkpoint") else node.name  # fmt: skip
    role, _, number = node.answer.name.rpartition("-")
    return f"trainer rank {number}" if role == "trainer" else node.answer.name


def _waiters(graph: Graph, root: Root) -> str:
    if not root.waiters:
        return ""
    met = {e.wait.what for e in root.reasons if e.wait is not None and e.wait.meeting}
    whose = f"its {min(met)}" if met and len(root.nodes) == 1 else "it"
    tails = {e.tail for e in graph.edges}
    if root.waiters >= len(tails - {n.name for n in root.nodes}) and root.waiters > 1:
        return f"; everyone else waits for {whose}"
    direct = sorted({e.tail for e in root.reasons} - {n.name for n in root.nodes})
    shown = ", ".join(direct[:3]) + (" and others" if len(direct) > 3 else "")
    number = f"{root.waiters} wait" if root.waiters > 1 else "1 waits"
    return f"; {number} for {whose}: {shown}"


def mostly(graph: Graph, found: Sequence[Root]) -> str:
    """Return what the trainer waits for at the moment."""
    waited = [r for r in found if r.waiters]
    ways = [r for r in waited if r.from_trainer] or waited
    names = list(dict.fromkeys(called(n) for r in ways for n in r.nodes))
    if not names:
        return ""
    trainer = graph.nodes.get("trainer")
    what = next((w.what for w in trainer.waits), "") if trainer is not None else ""
    seconds = max((w.seconds for w in trainer.waits), default=0.0) if trainer is not None else 0.0
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    if not what:
        return f"It waits for {shown} now."
    return f"The trainer has waited {seconds:.1f} s for {what}: {shown}."


def chain_to(graph: Graph, root: Root) -> list[str]:
    """Return the shortest way from the trainer, or from any waiter, to the culprit."""
    import networkx

    goal = {n.name for n in root.nodes}

    def step(edge: Edge) -> str:
        since = f" since {edge.wait.seconds:.1f} s: {edge.wait.what}" if edge.wait else ""
        return f"{edge.tail} waits for {edge.head}{since}"

    starts = [n for n in ("trainer", "sync", "rollouter") if n in graph.nodes]
    for start in [*starts, *(e.tail for e in root.reasons)]:
        for name, way in networkx.single_source_shortest_path(graph.ways, start).items():
            if name in goal and name != start:
                return [step(graph.ways.edges[pair]["edge"]) for pair in itertools.pairwise(way)]
    return []


def innermost(answer: ProcessStatus) -> str:
    """Return the innermost frame of the main thread."""
    lines = answer.stacks.get("MainThread") or [""]
    path, _, name = lines[-1].rpartition(" ")
    return f"{'/'.join(path.split('/')[-2:])} {name}".strip() or "an unknown frame"


def report(verdict: Verdict) -> str:
    """Return the whole report as text: the sentence, the way to the culprit, waits and stacks."""
    lines = [verdict.sentence, *([f"Next: {verdict.next}."] if verdict.next else [])]
    lines += [f"also stands still: {other}" for other in verdict.others]
    if verdict.chain:
        lines += ["", "the way from the trainer:", *(f"  {step}" for step in verdict.chain)]
    lines += ["", "processes:"] if verdict.answers else []
    for a in verdict.answers:
        kernel, moved = a.process, sorted(a.progress.items())
        state = f"{kernel.state} cpu {kernel.cpu_share:.0%} {kernel.wchan}" if kernel else ""
        counts = ", ".join(f"{k} {v:g} ({s:.0f} s ago)" for k, (v, s) in moved) or "nothing"
        answers = "DEAD" if a.dead else "does not answer" if a.silent else "answers"
        late = f", event loop late {a.late_s:.0f} s" if a.late_s >= LATE_S else ""
        lines.append(f"  {a.name} (process {a.pid}) {answers} {state}{late}; moved: {counts}")
        lines += [f"    child {c.pid} {c.state} {c.wchan} {c.command[:80]}" for c in a.children]
    waits = [(w, a) for a in verdict.answers for w in a.waits]
    waits.sort(key=lambda pair: -pair[0].seconds)
    lines += ["", "waits, the oldest first:"] if waits else []
    for w, a in waits[:_MOST_LINES]:
        who = w.who or a.name
        whom = f" on {w.whom}" if w.whom else ""
        times = f" ({w.count} times)" if w.count > 1 else ""
        inside = "" if a.name == DRIVER else f"{a.name}: "
        lines.append(f"  {w.seconds:8.1f} s  {inside}{who}{whom}: {w.what}{times}")
    if len(waits) > _MOST_LINES:
        lines.append(f"  and {len(waits) - _MOST_LINES} more, in the JSON")
    for a in sorted(verdict.answers, key=lambda a: a.name not in verdict.culprit):
        lines += ["", *(f"{a.name} fact {k}: {v}" for k, v in a.facts.items())]
        lines += [f"{a.name} {line}" for line in a.collectives]
        for thread, stack in a.stacks.items():
            lines += [f"stack of {a.name}, {thread}:", *(f"  {line}" for line in stack[-25:])]
    return "\n".join(lines) + "\n"


class StallWatch:
    """Looks at what moves, and raises the alarm once nothing has moved for `stall_s` seconds.

    The driver's counters come first, because they cost nothing. The others are asked only when the
    driver's stand still. After an alarm, the next one comes after twice the time.
    """

    def __init__(
        self,
        stall_s: float,
        ask: Callable[[], Sequence[ProcessStatus]],
        alarm: Callable[[Verdict], None],
    ) -> None:
        self._stall_s = stall_s
        self._ask, self._alarm = ask, alarm
        self._next = 0.0
        self._alarms = 0
        self._began: float | None = None

    def look(self, now: float, own_still_s: float | None) -> None:
        """Look once. `own_still_s` is the time since a counter of the driver has moved.

        It is None while the driver counts nothing. The time since the first look counts then.
        """
        self._began = now if self._began is None else self._began
        own_still_s = now - self._began if own_still_s is None else own_still_s
        if own_still_s < self._stall_s:
            self._alarms = 0
            return
        if now < self._next:
            return
        answers = self._ask()
        stills = [still for a in answers if (still := a.still_s) is not None]
        quiet = min(stills, default=own_still_s)
        if quiet < self._stall_s:  # Slow is not stuck: a worker moves.
            self._next = now + self._stall_s - quiet
            return
        self._alarms += 1
        self._next = now + self._stall_s * 2**self._alarms
        self._alarm(judge(answers, min(PATIENCE_S, self._stall_s)))


def save(verdict: Verdict, run: Path) -> Path | None:
    """Save a verdict as stall-TIME.txt and .json. Return the text, or None if there are enough."""
    if len(list(run.glob("stall-*.txt"))) >= MOST_FILES:
        return None
    path = run / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    path.write_text(report(verdict))
    path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(verdict)))
    return path
