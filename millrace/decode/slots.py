"""The state of fixed decode slots as vectors.

The model reads vectors on the device, and decisions use vectors on the host. This module uses
neither the model nor the event loop. Positions are absolute: the prompt's first token is at 0.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from millrace.decode.kv_cache import SlotCache
from millrace.decode.prefix_cache import PrefixCache
from millrace.decode.sampling import Nucleus, stream_keys
from millrace.rollout.requests import Start, cut_by_version
from millrace.types import (
    Floats,
    PolicyVersion,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
    floats_of,
    tokens_of,
)


@dataclass(slots=True, eq=False)
class Request:
    """One call of `generate`."""

    tokens: Tokens
    params: SamplingParams
    session: str
    future: Future[tuple[Segment, ...]]
    slot: int = -1
    """-1 while the request has no slot."""
    kept: PrefixCache | None = None
    """The kept context whose first `reused` tokens need no reading."""
    reused: int = 0
    starts: list[Start] = field(default_factory=list)
    """One for each version that served the request. A version without tokens makes no segment."""

    @property
    def kv_version(self) -> PolicyVersion:
        """Return the oldest version that computed K and V of the context."""
        return self.starts[-1].kv_version

    def at_version(self, drawn: int, version: PolicyVersion, kv_version: PolicyVersion) -> None:
        """Record that `version` draws the tokens after the first `drawn`."""
        self.starts.append(Start(drawn, version, kv_version))

    def segments(self, tokens: Tokens, log_probs: Floats, stop: Stop) -> tuple[Segment, ...]:
        """Return the drawn tokens as segments of one version each."""
        return cut_by_version(tokens, log_probs, self.starts, stop)


class SlotTable:
    """The request in each slot, and the vectors of their states."""

    def __init__(self, slots: int, cache: SlotCache, eos_ids: Sequence[int]) -> None:
        self.slots = slots
        self.cache = cache
        self.eos_ids = eos_ids
        self.requests: list[Request | None] = [None] * slots
        # Host mirrors, [slots]. `position` is the position of the next input token, so position + 1
        # tokens are known.
        self.live = np.zeros(slots, dtype=bool)
        self.position = np.zeros(slots, dtype=np.int64)
        self.prompt = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.key = np.zeros(slots, dtype=np.uint64)
        self.shift = np.zeros(slots, dtype=np.int64)
        """Position of a token minus its place in the random stream."""
        self.temperature = np.ones(slots, dtype=np.float32)
        self.greedy = np.zeros(slots, dtype=bool)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.eos = np.full((slots, max(len(eos_ids), 1)), -1, dtype=np.int64)
        self.ids = np.zeros((slots, cache.length), dtype=np.int32)
        """Every known token of each slot, including the prompt."""
        self._mirrors = (
            self.live, self.position, self.prompt, self.limit, self.key, self.shift,
            self.temperature, self.greedy, self.top_p, self.top_k, self.eos, self.ids,
        )  # fmt: skip
        self.with_stop: set[Request] = set()
        """Running requests with stop strings. Only these cost Python work for each token."""
        self.allocate()

    def allocate(self) -> None:
        cache = self.cache
        self.state = torch.zeros(4, self.slots, dtype=torch.int64, device=cache.device)
        """Rows: next input token, its position, its flat cache position, 1 for an occupied slot."""
        self.state[2] = cache.trash
        self.log_probs = torch.zeros(
            (self.slots + 1) * cache.length, dtype=torch.float32, device=cache.device
        )
        """The log-prob of each drawn token, at the token's flat cache position."""

    @property
    def occupied(self) -> int:
        return int(self.live.sum())

    @property
    def rows(self) -> int:
        """Number of decode rows that cover every occupied slot."""
        return int(self.live.nonzero()[0][-1]) + 1 if self.live.any() else 0

    def free(self, limit: int) -> list[int]:
        """Return at most `limit` empty slots, lowest first."""
        return [int(slot) for slot in (~self.live).nonzero()[0][:limit]]

    def running(self) -> list[Request]:
        return [r for r in self.requests if r is not None]

    def place(
        self,
        requests: Sequence[Request],
        slots: Sequence[int],
        version: PolicyVersion,
        max_len: int,
    ) -> None:
        """Put `requests` into `slots`. The next decode step reads the last token of each."""
        at = np.array(slots)
        for request, slot in zip(requests, slots, strict=True):
            request.slot = slot
            request.at_version(0, version, request.kept.version if request.kept else version)
            self.requests[slot] = request
            self.ids[slot, : len(request.tokens)] = np.frombuffer(request.tokens, dtype=np.int32)
            if request.params.stop:
                self.with_stop.add(request)
        params = [r.params for r in requests]
        lengths = np.array([len(r.tokens) for r in requests])
        self.live[at] = True
        self.position[at] = lengths - 1
        self.prompt[at] = lengths
        self.limit[at] = np.minimum(lengths + np.array([p.max_tokens for p in params]), max_len)
        self.key[at] = stream_keys([p.seed for p in params])
        self.shift[at] = lengths - np.array([p.offset for p in params])
        self.greedy[at] = [p.temperature == 0 for p in params]
        self.temperature[at] = [p.temperature or 1.0 for p in params]
        self.top_p[at] = [p.top_p for p in params]
        self.top_k[at] = [p.top_k for p in params]
        if self.eos_ids:
            self.eos[at] = np.where(
                np.array([p.ignore_eos for p in params])[:, None], -1, np.array(self.eos_ids)
            )
        self._seat(at)

    def _seat(self, at: np.ndarray) -> None:
        position = self.position[at]
        state = np.stack(
            [self.ids[at, position], position, at * self.cache.length + position, np.ones_like(at)]
        )
        index = self.to_device(at)
        self.state.index_copy_(1, index, self.to_device(state))
        self.cache.open(index, self.to_device(position + 1))

    def advance(self, tokens: np.ndarray) -> list[tuple[Request, Stop]]:
        """Record the drawn tokens (int64 [rows]) and return the requests that ended.

        A request ends by token or by length. The state on the device has already moved on.
        """
        rows = len(tokens)
        live = self.live[:rows]
        self.position[:rows] += live
        self.ids[np.arange(rows), self.position[:rows]] = tokens
        at_eos = (tokens[:, None] == self.eos[:rows]).any(axis=1)
        ended = (at_eos | (self.position[:rows] + 1 >= self.limit[:rows])) & live
        finished = []
        for slot in ended.nonzero()[0].tolist():
            request = self.requests[slot]
            assert request is not None
            finished.append((request, Stop.EOS if at_eos[slot] else Stop.LENGTH))
        return finished

    def move_down(self) -> None:
        """Move the highest occupied slots into the lowest gaps. `rows` then equals `occupied`."""
        count = self.occupied
        target = (~self.live[:count]).nonzero()[0]
        source = self.live[count:].nonzero()[0] + count
        length = round_length(int(self.position[source].max()) + 1, self.cache.length)
        for mirror in self._mirrors:
            mirror[target] = mirror[source]
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            request = self.requests[old]
            assert request is not None
            request.slot, self.requests[new], self.requests[old] = new, request, None
        to, frm = self.to_device(target), self.to_device(source)
        self.cache.move(frm, to, length)
        table = self.log_probs.view(self.slots + 1, -1)[:, :length]
        table.index_copy_(0, to, table.index_select(0, frm))
        state = self.state.index_select(1, frm)
        state[2] += (to - frm) * self.cache.length
        self.state.index_copy_(1, to, state)
        self._vacate(source)

    @torch.inference_mode()
    def release(self, requests: Sequence[Request]) -> list[tuple[Tokens, Floats]]:
        """Empty the slots of `requests` and return the tokens and log-probs of each."""
        at = np.array([r.slot for r in requests])
        index = self.to_device(at)
        # One transfer for all requests: a row of log-probs is small, but each transfer is slow.
        log_probs = self.log_probs.view(self.slots + 1, -1).index_select(0, index).cpu().numpy()
        drawn = []
        for i, request in enumerate(requests):
            slot = request.slot
            span = slice(int(self.prompt[slot]), int(self.position[slot]) + 1)
            tokens, floats = tokens_of(), floats_of()
            tokens.frombytes(self.ids[slot, span].tobytes())
            floats.frombytes(log_probs[i, span].tobytes())
            drawn.append((tokens, floats))
            self.requests[slot], request.slot = None, -1
            self.with_stop.discard(request)
        self._vacate(at)
        return drawn

    def _vacate(self, at: np.ndarray) -> None:
        self.live[at] = False
        self.position[at] = 0
        self.temperature[at] = 1.0
        self.greedy[at] = False
        self.top_p[at] = 1.0
        self.top_k[at] = 0
        self.state[2:].index_copy_(
            1,
            self.to_device(at),
            self.to_device(np.array([[self.cache.trash], [0]])).expand(-1, len(at)),
        )

    def drawn(self, request: Request) -> int:
        """Return the number of tokens drawn so far."""
        return int(self.position[request.slot] + 1 - self.prompt[request.slot])

    def context(self, request: Request) -> np.ndarray:
        """Return all known tokens but the last, int32. Their K and V belong in the cache."""
        return self.ids[request.slot, : self.position[request.slot]]

    def nucleus(self, rows: int, vocabulary: int) -> Nucleus | None:
        """Return top-p and top-k of the first `rows` slots, or None if no request has them."""
        top_p, top_k = self.top_p[:rows], self.top_k[:rows]
        if not (top_k.any() or (top_p < 1).any()):
            return None
        # Rows with top_p = 1 must keep even their least likely token. The rounded sum of
        # probabilities may reach 1 before it, so the limit is inf.
        return Nucleus(
            self.to_device(np.where(top_p == 1, np.float32(np.inf), top_p)),
            self.to_device(np.where(top_k == 0, vocabulary, top_k)),
        )

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.copy()).to(self.cache.device, non_blocking=True)


def round_length(length: int, most: int) -> int:
    """Round `length` up to a KV length, at most `most`.

    The result is a multiple of 16, and of larger powers of two for larger lengths. There are
    therefore few distinct shapes.
    """
    step = 16
    while step * 8 < length:
        step *= 2
    return min(-(-length // step) * step, most)
