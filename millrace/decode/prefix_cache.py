"""The KV of idle sessions: which pages have it, and whose pages are used again first. Pure numpy.

The bookkeeping knows no tensors. `SlotCache` copies pages between its slots and the kept pages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from millrace.types import PolicyVersion, Tokens


@dataclass(frozen=True, slots=True, eq=False)
class PrefixCache:
    """One context whose K and V are kept."""

    session: str
    tokens: np.ndarray
    """int32 [n]: the context from its first token."""
    version: PolicyVersion
    """The oldest version that computed some of its K and V."""
    pages: np.ndarray
    """int64 [pages]."""


class KeptKV:
    """The contexts of idle sessions in `pages` pages of `size` tokens each.

    A session may have several contexts, because an agent may have several threads. The context that
    was used least recently makes room for a new one.
    """

    def __init__(self, pages: int, size: int) -> None:
        self.evicted_tokens = 0
        """Tokens that had to make room, or that had none."""
        self._size = size
        self._pages = pages
        self.drop_all()

    def __contains__(self, kept: PrefixCache) -> bool:
        return kept in self._order

    @property
    def tokens(self) -> int:
        """Return the number of tokens whose K and V are kept."""
        return sum(len(kept.tokens) for kept in self._order)

    @property
    def oldest(self) -> PolicyVersion | None:
        """Return the oldest version that computed some of the kept K and V."""
        return min((kept.version for kept in self._order), default=None)

    def drop_all(self) -> None:
        self._free = list(range(self._pages))
        self._order: OrderedDict[PrefixCache, None] = OrderedDict()
        self._sessions: dict[str, list[PrefixCache]] = {}

    def find(
        self, session: str, tokens: Tokens, version: PolicyVersion
    ) -> tuple[PrefixCache | None, int]:
        """Return the kept context with the most first tokens in common, and their number.

        The last of `tokens` does not count: decoding reads it. K and V of versions before `version`
        serve only a request that extends their whole context.
        """
        best, most = None, 0
        known = self._sessions.get(session)
        if known:
            wanted = np.frombuffer(tokens, dtype=np.int32)[:-1]
            for kept in known:
                common = _common(kept.tokens, wanted)
                fresh = kept.version == version
                if common > most and (fresh or common == len(kept.tokens)):
                    best, most = kept, common
        return best, most

    def use(self, kept: PrefixCache, common: int) -> None:
        """Note that a slot has the first `common` tokens of `kept`.

        If these are all of it, it is the first to make room.
        """
        if kept in self._order:
            self._order.move_to_end(kept, last=common < len(kept.tokens))

    def keep(self, session: str, tokens: np.ndarray, version: PolicyVersion) -> PrefixCache | None:
        """Return the pages for a context. None if it is kept already, or if it has no room.

        It replaces the contexts of its session that it extends.
        """
        if not self._pages or not len(tokens):
            return None
        for kept in list(self._sessions.get(session, ())):
            common = _common(kept.tokens, tokens)
            if common == len(tokens):
                self._order.move_to_end(kept)
                return None
            if common == len(kept.tokens):
                self._remove(kept)
        needed = -(-len(tokens) // self._size)
        if needed > self._pages:
            self.evicted_tokens += len(tokens)
            return None
        while len(self._free) < needed:
            oldest = next(iter(self._order))
            self.evicted_tokens += len(oldest.tokens)
            self._remove(oldest)
        pages = np.array([self._free.pop() for _ in range(needed)], dtype=np.int64)
        kept = PrefixCache(session, tokens.copy(), version, pages)
        self._order[kept] = None
        self._sessions.setdefault(session, []).append(kept)
        return kept

    def _remove(self, kept: PrefixCache) -> None:
        del self._order[kept]
        self._free.extend(kept.pages.tolist())
        own = self._sessions[kept.session]
        own.remove(kept)
        if not own:
            del self._sessions[kept.session]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of first tokens that `a` and `b` have in common."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
