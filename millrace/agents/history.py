"""The tree of messages of one episode: where a request attaches, and which turns are dead."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from millrace.agents.memo import Memo
from millrace.agents.request import RequestError
from millrace.types import Message

Cause = Literal["subagent", "tools", "compacted", "edited", "foreign", "template"]
"""Why a request opens another thread, or branches off inside one."""

Key = tuple[Hashable, ...]


def canonical_json(text: str) -> str:
    """Return equal strings for arguments of equal meaning. Text that is no JSON stays itself."""
    try:
        value = json.loads(text, parse_float=_number) if text.strip() else {}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


_same_json = Memo(canonical_json)


def _number(text: str) -> float:
    """Return a number of JSON with a point. 2.0 is the integer 2."""
    value = float(text)
    return int(value) if value.is_integer() else value


def canonical(message: Message) -> Key:
    """Return what makes a normal message the one that it is, without the ids of its calls.

    Thinking is left out, because most clients do not send it back.
    """
    role, text = message["role"], message["content"] or ""
    if role == "assistant":
        functions = [c["function"] for c in message.get("tool_calls", ())]
        calls = tuple((f["name"], _same_json(f["arguments"])) for f in functions)
        return (role, text.strip(), calls)
    return (role, text, message.get("tool_call_id"))


def _ids(message: Message) -> list[str]:
    return [c["id"] for c in message.get("tool_calls", ())]


@dataclass(slots=True, eq=False)
class Node:
    """One message in the tree. It knows the turn that drew it, if one did."""

    message: Message | None
    parent: Node | None
    depth: int
    turn: int | None = None
    children: dict[Key, list[Node]] = field(default_factory=dict)
    asked: bool = False
    """Whether a request ended here."""
    deepest: int = 0
    """The depth of the deepest request at or below this message."""

    def path(self) -> list[Node]:
        """Return the nodes from the first message to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def child(self, message: Message) -> Node:
        """Return the child that `message` is. Add it if it is new."""
        return next(iter(self.children.get(canonical(message), ())), None) or self.grow(message)

    def grow(self, message: Message) -> Node:
        """Return a new child, next to others of equal meaning."""
        made = Node(message, self, self.depth + 1)
        self.children.setdefault(canonical(message), []).append(made)
        return made


@dataclass(frozen=True, slots=True)
class HistoryMatch:
    """The place in a history where a request attaches."""

    anchor: int | None
    """The deepest turn of ours that the request continues."""
    known: tuple[Message, ...]
    """The messages up to the anchor, with our own as they were drawn."""
    new: tuple[Message, ...]
    """The messages after the anchor, or all of them."""
    cause: Cause | None
    """Why this is a fork. None: the request continues its thread, or asks again."""
    end: Node
    """The node of the request's last message."""


class History:
    """Every message of an episode, by the requests that named it.

    A scope separates requests that share no thread: other tools, or an auxiliary model.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._systems: set[str] = set()
        self._delivered: dict[int, int] = {}  # turn -> when its answer left, as a counter
        self._clock = 0
        self._extended: set[int] = set()
        self._siblings: dict[Hashable, list[int]] = {}

    def attach(self, messages: Sequence[Message], scope: Hashable) -> HistoryMatch:
        """Return where normal messages attach. The client received the turns on their path."""
        if not messages:
            raise RequestError("messages is empty. Fix: send at least one message")
        root = self._roots.setdefault(scope, Node(None, None, 0))
        leaf = self._walk(root, messages)
        path = leaf.path()
        anchor = next((n for n in reversed(path) if n.turn is not None), None)
        self._extended.update(n.turn for n in path if n.turn is not None)
        cause = self._cause(messages, scope, leaf, anchor)
        self._systems.add(_system(messages))
        depth = anchor.depth if anchor else 0
        known = tuple(n.message for n in path[:depth] if n.message)
        end = self._ask(leaf, messages)
        turn = anchor.turn if anchor else None
        return HistoryMatch(turn, known, tuple(messages[depth:]), cause, end)

    def add(self, place: HistoryMatch, turn: int, answer: Message, group: Hashable) -> None:
        """Add the turn that answers a request.

        Turns of one `group` have the same parent and answer the same request.
        """
        place.end.grow(answer).turn = turn
        self.join(turn, group)

    def join(self, turn: int, group: Hashable) -> None:
        """Add a turn to its siblings. One of /v1/completions has no message."""
        self._siblings.setdefault(group, []).append(turn)
        self.delivered(turn)

    def delivered(self, turn: int) -> None:
        """Note that the answer left our hands."""
        self._clock += 1
        self._delivered[turn] = self._clock

    def undelivered(self, turn: int) -> None:
        """Note that nobody received the answer."""
        self._delivered.pop(turn, None)

    def extend(self, turn: int) -> None:
        """Note that a request continues `turn`, so that its answer was received."""
        self._extended.add(turn)

    def dead(self) -> list[int]:
        """Return the turns that are not trained.

        Of siblings, those live that a request continues. If there is none, the sibling lives whose
        answer left last. A turn that nobody received is dead.
        """
        dead: list[int] = []
        for turns in self._siblings.values():
            alive = self._extended.intersection(turns)
            left = [t for t in turns if t in self._delivered]
            if not alive and left:
                alive = {max(left, key=self._delivered.__getitem__)}
            dead += [t for t in turns if t not in alive]
        return sorted(dead)

    def _walk(self, root: Node, messages: Sequence[Message]) -> Node:
        """Return the deepest node on the path of `messages`.

        Siblings may have equal text. Ids tell them apart, then the deeper path, then the answer
        that left last.
        """
        front = [root]
        for message in messages:
            key = canonical(message)
            found = [n for node in front for n in node.children.get(key, ())]
            if not found:
                break
            ids = _ids(message)
            front = [n for n in found if ids and n.message and _ids(n.message) == ids] or found
        return front[0] if len(front) == 1 else max(front, key=self._rank)

    def _rank(self, node: Node) -> tuple[int, int]:
        turns = (n.turn for n in reversed(node.path()) if n.turn is not None)
        turn = next(turns, -1)
        return self._delivered.get(turn, 0), turn

    def _ask(self, leaf: Node, messages: Sequence[Message]) -> Node:
        end = leaf
        for message in messages[leaf.depth :]:
            end = end.child(message)
        end.asked = True
        node: Node | None = end
        while node is not None:
            node.deepest = max(node.deepest, end.depth)
            node = node.parent
        return end

    def _cause(
        self, messages: Sequence[Message], scope: Hashable, leaf: Node, anchor: Node | None
    ) -> Cause | None:
        if not self._systems or (leaf.depth == len(messages) and leaf.asked):
            return None
        if anchor is not None:
            return "edited" if anchor.deepest else None
        if _system(messages) not in self._systems:
            return "subagent"
        others = (r for s, r in self._roots.items() if s != scope)
        if any(n.turn is not None for r in others for n in self._walk(r, messages).path()):
            return "tools"
        if len(messages) < self._roots[scope].deepest:
            return "compacted"
        if leaf.depth > sum(m["role"] == "system" for m in messages):
            return "edited"
        return "foreign" if any(m["role"] == "assistant" for m in messages) else "subagent"


def _system(messages: Sequence[Message]) -> str:
    return "\0".join(m["content"] for m in messages if m["role"] == "system")
