"""The synchronous half of the torch rollout engine.

Each step reads new prompts and draws one token in every occupied slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.decode import kv_cache as kv_slots
from millrace.decode.kv_cache import ALIGN, Extension, Forward, Prefill, SlotCache, round_up
from millrace.decode.prefill import ExtensionPlan, PrefillPlan, plan_extension, plan_prefill
from millrace.decode.prefix_cache import KeptKV
from millrace.decode.sampling import draw, uniforms
from millrace.decode.slots import Request, SlotTable, round_length
from millrace.errors import bad_value
from millrace.types import PolicyVersion, Stop

PREFILL_TOKENS = 16384
"""Largest number of padded context tokens in one forward pass. A single context may exceed it.

The limit bounds memory and the pause of decoding.
"""
FIXED_PROMPTS = 8
"""Number of contexts in every prefill batch of deterministic mode."""


class Decoder:
    """A model, its slots and its KV cache. Between two steps, the caller adds and removes requests.

    With `deterministic`, every forward pass has one of a few fixed shapes, and only the length of a
    request selects its shape. The bits of a request are then independent of other requests, if the
    device's matrix products treat all rows of a matrix alike.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Sequence[int],
        slots: int,
        max_len: int,
        deterministic: bool,
        kept_slots: int = 0,
    ) -> None:
        parameter = next(model.parameters())
        self.model = model
        self.slots = slots
        self.max_len = max_len
        self.deterministic = deterministic
        # A multiple of 8 rows: scalar code would compute the remaining rows with other rounding.
        width = round_up(slots, 8) if deterministic else slots
        pages = kept_slots * round_up(max_len, ALIGN) // ALIGN
        self.cache = SlotCache(width, max_len, parameter.dtype, parameter.device, pages)
        self.kept = KeptKV(pages, ALIGN)
        self.table = SlotTable(width, self.cache, eos_ids)
        self.no_mask = torch.zeros(1, 1, 1, 1, device=parameter.device)
        """A mask with four dimensions, which stops transformers from building its own mask."""

    @torch.inference_mode()
    def allocate(self) -> None:
        """Allocate the KV cache, and check that the model's attention uses it."""
        kv_slots.register()
        self.model.set_attn_implementation(kv_slots.NAME)
        self.cache.allocate()
        self.table.allocate()
        trash = torch.tensor([self.cache.trash], device=self.cache.device)
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.cache.device)
        self._call(one, one, Forward(self.cache, 0, 0, trash, None, Prefill(1, 1, None, None)))
        if not self.cache.layers:
            raise bad_value(
                "model.path",
                type(self.model).__name__,
                "its attention does not go through transformers' attention interface",
                "a causal model with standard attention, such as Qwen2 or Llama",
            )

    def free(self) -> None:
        self.kept.drop_all()
        self.cache.free()

    @torch.inference_mode()
    def step(
        self, arrived: Sequence[Request], version: PolicyVersion
    ) -> list[tuple[Request, Stop]]:
        """Put the requests `arrived` into slots, and draw one token in each occupied slot.

        There must be an empty slot for each of `arrived`. Returns the requests that ended by token
        or by length.
        """
        table = self.table
        plan, extension = None, None
        if arrived:
            table.place(arrived, table.free(len(arrived)), version, self.max_len)
            if self.deterministic:
                self.read(arrived)
            else:
                known = [r for r in arrived if r.reused]
                plan = self._plan([r for r in arrived if not r.reused])
                extension = self._restore(known) if known else None
        rows = table.slots if self.deterministic else min(round_up(table.rows, 8), table.slots)
        logits = self._forward(rows, plan, extension)
        place = table.position[:rows] + 1 - table.shift[:rows]
        temperature, greedy = table.temperature[:rows], table.greedy[:rows]
        tokens, log_probs = draw(
            logits,
            table.to_device(uniforms(table.key[:rows], place)),
            temperature=table.to_device(temperature) if (temperature != 1).any() else None,
            greedy=table.to_device(greedy) if greedy.any() else None,
            nucleus=table.nucleus(rows, logits.shape[-1]),
        )
        state = table.state[:, :rows]
        state[0] = tokens
        state[1:3] += state[3]
        table.log_probs.index_copy_(0, state[2], log_probs)
        return table.advance(tokens.cpu().numpy())

    @torch.inference_mode()
    def read(self, requests: Sequence[Request]) -> None:
        """Read the contexts of requests in slots into the cache, without drawing.

        The requests are new ones or, after a change of weights, all requests.
        """
        for group in self._groups(requests):
            plan = self._plan(group)
            if plan is not None:
                self._forward(0, plan)

    @torch.inference_mode()
    def keep(self, requests: Sequence[Request]) -> None:
        """Keep the K and V of requests that leave their slots, as far as there is room."""
        kept = [
            (r.slot, entry)
            for r in requests
            if (entry := self.kept.keep(r.session, self.table.context(r), r.kv_version))
        ]
        # A later request of this call may have taken the pages of an earlier one.
        kept = [(slot, entry) for slot, entry in kept if entry in self.kept]
        if kept:
            self.cache.keep(*self._pages_of((slot, entry.pages) for slot, entry in kept))

    def _restore(self, requests: Sequence[Request]) -> ExtensionPlan | None:
        """Copy the kept K and V of `requests` into their slots. Plan the read of their new tokens."""
        pairs = []
        for r in requests:
            assert r.kept is not None
            pairs.append((r.slot, r.kept.pages[: -(-r.reused // ALIGN)]))
            self.kept.use(r.kept, r.reused)
        slots, kept = self._pages_of(pairs)
        self.cache.restore(kept, slots)
        return plan_extension(
            [self.table.context(r) for r in requests],
            [r.reused for r in requests],
            [r.slot for r in requests],
            self.cache.length,
        )

    def _pages_of(
        self, pairs: Iterable[tuple[int, np.ndarray]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages of slots and the kept pages, one for one, of (slot, kept pages)."""
        per_slot = self.cache.length // ALIGN
        found = [(slot * per_slot + np.arange(len(pages)), pages) for slot, pages in pairs]
        slots, kept = (np.concatenate(side) for side in zip(*found, strict=True))
        return self.table.to_device(slots), self.table.to_device(kept)

    @torch.inference_mode()
    def compact(self) -> None:
        """Close the gaps between occupied slots if at least a quarter of the rows are empty.

        With fewer gaps, the move costs more than the gaps.
        """
        if not self.deterministic and 0 < self.table.occupied * 4 <= self.table.rows * 3:
            self.table.move_down()

    def _groups(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Yield groups of requests whose contexts are read together.

        In deterministic mode, a group has a fixed shape. Otherwise, PREFILL_TOKENS limits it.
        """
        if self.deterministic:
            by_length: dict[int, list[Request]] = {}
            for request in requests:
                by_length.setdefault(self._fixed_length([request]), []).append(request)
            for group in by_length.values():
                yield from (
                    group[i : i + FIXED_PROMPTS] for i in range(0, len(group), FIXED_PROMPTS)
                )
            return
        group, longest = [], 0
        for request in sorted(requests, key=lambda r: len(self.table.context(r))):
            longest = len(self.table.context(request))
            if group and (len(group) + 1) * longest > PREFILL_TOKENS:
                yield group
                group = []
            group.append(request)
        if group:
            yield group

    def _fixed_length(self, requests: Sequence[Request]) -> int:
        longest = max(len(self.table.context(r)) for r in requests)
        return max(16, 1 << (longest - 1).bit_length()) if longest else 0

    def _plan(self, requests: Sequence[Request]) -> PrefillPlan | None:
        if not requests:
            return None
        fixed = (FIXED_PROMPTS, self._fixed_length(requests)) if self.deterministic else None
        contexts = [self.table.context(r) for r in requests]
        return plan_prefill(contexts, [r.slot for r in requests], self.cache.length, fixed)

    def _forward(
        self, rows: int, plan: PrefillPlan | None, extension: ExtensionPlan | None = None
    ) -> torch.Tensor:
        """Read the plans' contexts, and the next input token of the first `rows` slots.

        Returns logits [rows, vocabulary].
        """
        ids, positions, flat = self.table.state[:3, :rows].unsqueeze(1).unbind(0)
        write_to, write_from, prefill = flat[0], None, None
        self.cache.mask.view(-1).index_fill_(0, write_to, 0.0)
        move = self.table.to_device
        if extension is not None:
            ids = torch.cat((move(extension.tokens)[None], ids), dim=1)
            positions = torch.cat((move(extension.positions)[None], positions), dim=1)
            write_to = torch.cat((move(extension.write_to), write_to))
        if plan is not None:
            after = ids.shape[1]
            ids = torch.cat((move(plan.tokens)[None], ids), dim=1)
            positions = torch.cat((move(plan.positions)[None], positions), dim=1)
            own = np.arange(after) + len(plan.tokens)
            write_from = move(np.concatenate((plan.write_from, own)))
            write_to = torch.cat((move(plan.write_to), write_to))
            gathers = (None if t is None else move(t) for t in (plan.padded_from, plan.packed_from))
            prefill = Prefill(plan.prompts, plan.longest, *gathers)
        known = int(self.table.position[:rows].max()) + 1 if rows else 0
        length = self.cache.length if self.deterministic else round_length(known, self.cache.length)
        extended = None if extension is None else self._extension(extension)
        return self._call(
            ids,
            positions,
            Forward(self.cache, rows, length, write_to, write_from, prefill, extended),
        )[-rows:]

    def _extension(self, plan: ExtensionPlan) -> Extension:
        move = self.table.to_device
        length = round_length(int(plan.positions.max()) + 1, self.cache.length)
        ends = plan.positions[plan.padded_from].reshape(len(plan.slots), 1, plan.longest, 1)
        return Extension(
            move(plan.slots),
            len(plan.tokens),
            plan.longest,
            move(plan.padded_from),
            move(plan.packed_from),
            torch.arange(length, device=self.cache.device) <= move(ends),
        )

    def _call(self, ids: torch.Tensor, positions: torch.Tensor, forward: Forward) -> torch.Tensor:
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self.no_mask,
            use_cache=False,
            logits_to_keep=max(forward.rows, 1),
            slot_forward=forward,
        )
        logits: torch.Tensor = out.logits[0]
        return logits
