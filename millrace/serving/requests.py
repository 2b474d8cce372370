"""A request to a serving engine: its state while it runs, its prefix cache, and its result."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millrace.errors import WorkerError
from millrace.rollout.requests import Start, check_kv, completes_stop, stop_window
from millrace.types import Experts, Floats, PolicyVersion, SamplingParams, Tokens, tokens_of


class Salt(NamedTuple):
    """Salts that separate the weights in an engine's prefix cache."""

    number: int
    """The number of swaps before its first use.

    The version cannot be the salt: another run on this engine starts at version 0 again.
    """
    version: PolicyVersion
    """The version of the oldest K and V under it."""


NO_SALT = Salt(0, 0)


class Salts:
    """The salts of the contexts of sessions.

    A request that extends a context of its session gets its salt. So it finds its own K and V
    again, also after a swap. Another request gets the newest salt, which hides older K and V.
    """

    SESSIONS = 16384
    """Sessions to remember. One that is forgotten reads its history again."""
    CONTEXTS = 8
    """Contexts to remember of each session. An agent may have several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, dict[tuple[int, bytes], Salt]] = OrderedDict()
        self._since = 0
        """The number of swaps before the oldest K and V that a session may keep."""

    def of(self, session: str, tokens: Tokens, newest: Salt) -> Salt:
        """Return the salt of the longest context of `session` that `tokens` extend."""
        for (length, digest), salt in sorted(self._known.get(session, {}).items(), reverse=True):
            if length <= len(tokens) and _digest(tokens[:length]) == digest:
                return salt
        return newest

    def remember(self, session: str, tokens: Tokens, salt: Salt) -> None:
        """Remember that the K and V of `tokens` are in the cache under `salt`."""
        contexts = self._known.setdefault(session, {})
        self._known.move_to_end(session)
        contexts[len(tokens), _digest(tokens)] = salt
        if len(contexts) > self.CONTEXTS:
            del contexts[next(iter(contexts))]
        if len(self._known) > self.SESSIONS:
            self._known.popitem(last=False)

    def drop_all(self, since: int = 0) -> None:
        """Forget all salts. From now on, none may be older than `since` swaps."""
        self._known.clear()
        self._since = max(self._since, since)

    def check(self) -> None:
        """Raise SyncError if a session keeps K and V that it must not keep."""
        numbers = (salt.number for known in self._known.values() for salt in known.values())
        check_kv(min(numbers, default=None), self._since, "swap")


def _digest(tokens: Tokens) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One call of `generate`."""

    tokens: Tokens
    params: SamplingParams
    session: str
    id: str = ""
    salt: Salt = NO_SALT
    starts: list[Start] = field(default_factory=list)
    interrupted: bool = False
    log_probs: bytes = b""
    """The log-probs of an interrupted request, as float32, saved before the engine discards them."""
    experts: bytes = b""
    """Its `packed` experts."""
    drawn: int = 0
    """The tokens that were drawn when the engine forgot the request. Its call has not returned yet."""
    restart: bool = False
    """The engine aborted the request before its first token. It restarts under the new version."""

    def begin(self, salts: Salts, swaps: int, version: PolicyVersion) -> None:
        """Note that the engine gets the request now. It draws under `version`."""
        self.salt = salts.of(self.session, self.tokens, Salt(swaps, version))
        self.starts, self.drawn = [Start(0, version, version)], 0

    def swapped(self, drawn: int, version: PolicyVersion, *, recompute: bool) -> None:
        """Note that `version` draws the tokens after the first `drawn`."""
        self.starts.append(
            Start(drawn, version, version if recompute else self.starts[-1].kv_version)
        )

    def found(self, cached: int) -> int:
        """Note that `cached` tokens of the prompt were in the prefix cache. Return their number.

        A swap that computed K and V anew did not read them.
        """
        if cached:
            first = self.starts[0].kv_version
            old = min(first, self.salt.version)
            self.starts = [
                s._replace(kv_version=old) if s.kv_version == first else s for s in self.starts
            ]
        return cached


@dataclass(frozen=True, slots=True)
class Drawn:
    """The result of one request."""

    tokens: Tokens
    log_probs: Floats
    reason: str
    """The engine's reason: "stop", "length", "abort", or "string" for a stop string."""
    experts: Experts | None = None


def packed(experts: Any) -> bytes:
    """Return experts [tokens, layers, k] as bytes, after their type's letter and a token's size."""
    return struct.pack("<cH", experts.dtype.char.encode(), experts[0].size) + experts.tobytes()


def experts_of(request: ActiveRequest, experts: bytes, drawn: int) -> Experts | None:
    """Return the experts from `experts_from` to the token that predicts the last drawn one."""
    first = request.params.experts_from
    if first is None or not drawn:
        return None
    kind, width = struct.unpack_from("<cH", experts or b"B\0\0")
    found = array(kind.decode())
    found.frombytes(experts[3:])
    wanted = (len(request.tokens) - 1 - first + drawn) * width
    if not wanted or len(found) < wanted:
        raise WorkerError(
            f"the engine returned {len(found)} experts of a response, and its tokens have {wanted}: "
            "router replay would be wrong. Fix: model.router_replay=disabled"
        )
    return found[:wanted]


def stop_string_end(
    request: ActiveRequest, drawn: Tokens, checked: int, decode: Callable[[Tokens], str]
) -> int:
    """Return the number of tokens up to the end of a stop string, or 0 if there is none.

    The first `checked` tokens were checked before.
    """
    stop, offset = request.params.stop, request.params.offset
    window = stop_window(stop)
    # Only tokens of this response count, including those of its earlier calls.
    before = request.tokens[len(request.tokens) - min(window, offset) :] if offset else tokens_of()
    for end in range(checked + 1, len(drawn) + 1):
        tail = (before + drawn[max(0, end - window) : end])[-window:]
        if completes_stop(tail, stop, decode):
            return end
    return 0
