"""The wait graph of a run, and its root: who holds everybody up. Pure functions of answers.

A node is an actor, a process, or someone outside, such as a tool. An edge says that its tail waits
for its head. A root is a node that waits for nobody, or a circle that nobody leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from millrace.waits.answer import ProcessStatus, Waited, collective_in

DRIVER = "driver"
NETWORK = "the network"
NOBODY = "nobody"
LATE_S = 1.0
"""How late an event loop may be before its tasks count as held up by it."""


@dataclass(slots=True, eq=False)
class Node:
    """An actor, a process, or someone outside."""

    name: str
    answer: ProcessStatus | None = None
    """The process in which it is. None for someone outside."""
    is_process: bool = False
    seconds: float = 0.0
    """For how long it has been what it is."""
    waits: list[Waited] = field(default_factory=list)
    work: list[Waited] = field(default_factory=list)
    children: list[str] = field(default_factory=list)

    @property
    def newest_work(self) -> Waited | None:
        return min(self.work, key=lambda w: w.seconds, default=None)


@dataclass(frozen=True, slots=True)
class Edge:
    """`tail` waits for `head`. `wait` is None where a parent waits for its child."""

    tail: str
    head: str
    wait: Waited | None = None


@dataclass(slots=True)
class Root:
    """A root: one node, or the nodes of a circle."""

    nodes: list[Node]
    waiters: int
    """How many nodes wait for it, directly or not."""
    reasons: list[Edge]
    """The edges into it, and those inside a circle."""
    from_trainer: bool
    seconds: float
    moving: bool
    severe: bool
    """Whether its process is dead, stopped or silent."""


class Graph:
    """The nodes and edges of some answers."""

    def __init__(self, answers: Sequence[ProcessStatus]) -> None:
        self.answers = {a.name: a for a in answers}
        self.nodes: dict[str, Node] = {}
        self.edges: list[Edge] = []
        for answer in answers:
            self._add_nodes(answer)
        for node in list(self.nodes.values()):
            for wait in node.waits:  # Someone outside may be one of those that a pattern means.
                if not {"*", "|"} & set(wait.whom) and f"{wait.whom}/{wait.what}" not in self.nodes:
                    self._outside(wait.whom)
        for node in list(self.nodes.values()):
            self._add_edges(node)
        import networkx  # takes a quarter of a second, which only a verdict pays

        self.ways: Any = networkx.DiGraph()
        """The first edge of each pair of nodes."""
        self.ways.add_nodes_from(self.nodes)
        self.ways.add_edges_from((e.tail, e.head, {"edge": e}) for e in reversed(self.edges))

    def _add_nodes(self, answer: ProcessStatus) -> None:
        self.nodes[answer.name] = Node(answer.name, answer, True)
        for acted in answer.actors:
            node = self._node(answer, acted.who)
            node.seconds = max(node.seconds, acted.seconds)
        for acted in answer.actors:
            parent = self.nodes.get(id_of(answer, acted.parent))
            child = id_of(answer, acted.who)
            if parent is not None and acted.parent and parent.name != child:
                parent.children.append(child)
        for wait in [*answer.waits, *_collective(answer)]:
            node = self._node(answer, wait.who)
            (node.work if wait.work else node.waits).append(wait)

    def _node(self, answer: ProcessStatus, who: str) -> Node:
        name = id_of(answer, who)
        return self.nodes.setdefault(name, Node(name, answer))

    def _outside(self, name: str) -> str:
        self.nodes.setdefault(name, Node(name))
        return name

    def _add_edges(self, node: Node) -> None:
        answer = node.answer
        if answer is None:
            return
        late = answer.late_s >= LATE_S
        if late and answer.name == DRIVER:
            # What its tasks wait for may be there: they have not run since.
            if not node.is_process:
                self.edges.append(Edge(node.name, DRIVER))
            return
        if node.is_process and late and not answer.silent:
            # A call that is not served waits for what blocks the event loop.
            inside = (n for n in self.nodes.values() if n.answer is answer and n is not node)
            self.edges += [Edge(node.name, n.name) for n in inside if n.work or n.waits]
        before = len(self.edges)
        for wait in node.waits:
            self.edges += [Edge(node.name, head, wait) for head in self._heads(node, wait)]
        self.edges += [Edge(node.name, child) for child in node.children]
        if len(self.edges) == before and not node.is_process and answer.name != DRIVER:
            # Such as vLLM's core: a process of the worker that has stopped.
            parts = [a for n, a in self.answers.items() if n.startswith(f"{answer.name}-")]
            self.edges += [Edge(node.name, a.name) for a in parts if a.silent]
        newest = node.newest_work
        if len(self.edges) == before and newest is not None and newest.whom:
            self.edges.append(Edge(node.name, self._outside(newest.whom), newest))

    def _heads(self, node: Node, wait: Waited) -> list[str]:
        for whom in wait.whom.split("|"):
            if "*" in whom:
                names = [
                    n.name
                    for n in self.nodes.values()
                    if fnmatchcase(n.name, whom)
                    and "/" not in n.name
                    and not (n.is_process and n.answer is node.answer)
                ]
                if wait.meeting:
                    absent = [n for n in names if not self._has_come(n, wait)]
                    if absent or any(self._has_come(n, wait, 1) for n in names) or not names:
                        # Who is behind the others is waited for, and waits for nobody.
                        return [self._member(n, node, wait) for n in absent]
                    return [self._outside(f"{NETWORK} of {wait.meeting}")]
                if names:
                    return names
            elif wait.meeting and whom in self.answers:
                if self._has_come(whom, wait):
                    return [self._outside(f"{NETWORK} of {wait.meeting}")]
                return [self._member(whom, node, wait)]
            elif f"{whom}/{wait.what}" in self.nodes:
                return [f"{whom}/{wait.what}"]
            elif whom in self.nodes and whom != node.name:
                return [whom]
        last = wait.whom.split("|")[-1]
        known = "*" in last or not last
        return [self._outside(f"{NOBODY} for {wait.what}" if known else last)]

    def _has_come(self, process: str, wait: Waited, ahead: int = 0) -> bool:
        return any(
            w.meeting == wait.meeting and w.number >= wait.number + ahead
            for name, answer in self.answers.items()
            if name == process or name.startswith(f"{process}-")  # or a part, such as vLLM's core
            for node in self.nodes.values()
            if node.answer is answer
            for w in node.waits
        )

    def _member(self, process: str, node: Node, wait: Waited) -> str:
        """Return the node of `process` that has not come to the meeting."""
        answer = self.answers[process]
        inside = [n for n in self.nodes.values() if n.answer is answer and not n.is_process]
        same = [n for n in inside if any(w.meeting == wait.meeting for w in n.waits)]
        role = node.name.partition("/")[2]
        roles = (role, role.replace("receiver.", "sender."), role.replace("sender.", "receiver."))
        alike = [n for n in inside if n.name.partition("/")[2] in roles]
        busy = [n for n in inside if n.work or n.waits] if answer.late_s >= LATE_S else []
        return next((n.name for n in (*same, *alike, *busy)), process)


def id_of(answer: ProcessStatus, who: str) -> str:
    """Return the name of an actor's node."""
    if not who:
        return answer.name
    return who if answer.name == DRIVER else f"{answer.name}/{who}"


def _collective(answer: ProcessStatus) -> list[Waited]:
    """Return a wait for the other ranks if a rank's stacks are in a collective of torch."""
    role, dash, _ = answer.name.rpartition("-")
    if not dash or role != "trainer" or any(w.meeting for w in answer.waits):
        return []
    name = collective_in(answer.stacks)
    busy = [w for w in answer.waits if w.work]
    if not name or not busy:  # A rank that loads or saves is in no step.
        return []
    newest = min(busy, key=lambda w: w.seconds)
    passes = int(answer.progress.get("passes", (0, 0))[0])
    number = 2 * passes + newest.what.startswith("backward")
    return [Waited(newest.who, "trainer-*", name, newest.seconds, 1, "a step", number)]


def roots(graph: Graph, patience_s: float) -> list[Root]:
    """Return the roots, the most likely culprit first."""
    import networkx

    found = []
    for circle in networkx.attracting_components(graph.ways):
        names = sorted(circle)
        waiters = networkx.ancestors(graph.ways, names[0]) - circle
        reasons = [e for e in graph.edges if e.head in circle]
        found.append(_root(graph, names, reasons, waiters, patience_s))
    found = [r for r in found if r.waiters or len(r.nodes) > 1 or r.severe]

    def weight(root: Root) -> tuple[float, ...]:
        return root.severe, not root.moving, root.from_trainer, root.waiters, root.seconds

    return sorted(found, key=weight, reverse=True)


def _root(
    graph: Graph, names: Sequence[str], reasons: list[Edge], waiters: set[str], patience_s: float
) -> Root:
    nodes = [graph.nodes[name] for name in names]
    asked = max((e.wait.seconds for e in reasons if e.wait is not None), default=0.0)
    only = nodes[0]
    seconds, moving, severe = asked, False, False
    if len(nodes) == 1 and only.answer is not None:
        answer, work = only.answer, only.newest_work
        severe = answer.silent or bool(answer.dead)
        if not waiters and only.name.startswith(("rollout-", "trainer-")):
            severe = False  # A lost worker: the run goes on without it, or starts it anew.
        late = answer.name == DRIVER and only.is_process and answer.late_s
        seconds = late or (work.seconds if work is not None else asked or only.seconds)
        still = answer.still_s if answer.name != DRIVER else None
        moving = not severe and still is not None and still < patience_s
    moving = moving or (not severe and seconds < patience_s)
    trains = bool((waiters | set(names)) & {"trainer", "sync"})
    return Root(nodes, len(waiters), reasons, trains, seconds, moving, severe)
