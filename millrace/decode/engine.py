"""The embedded rollout engine: continuous batching of a transformers causal model, without threads.

It serves calls of `generate` in this process. While there is work, one asyncio task draws a token
for every occupied slot and then yields to the event loop, again and again. All other code runs
during these yields, between two tokens. Interrupt, swap and cancellation therefore need no flags
and no locks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch
from transformers import PreTrainedModel

from millrace.config import ModelConfig, Sides
from millrace.decode.decoder import PREFILL_TOKENS, Decoder
from millrace.decode.slots import Request
from millrace.errors import SyncError, WorkerError
from millrace.models.model import folder_eos_ids, load_model
from millrace.models.tokenizer import text_of
from millrace.ports import RolloutStats
from millrace.rollout.requests import check_kv, check_request, completes_stop, stop_window
from millrace.types import PolicyVersion, SamplingParams, Segment, Stop, Tokens, tokens_of
from millrace.waits.registry import gauge


class TorchRolloutEngine:
    """A RolloutEngine and a WeightHolder.

    `slots` requests decode together. The others wait in order of arrival. A prompt and its response
    together have at most `max_len` tokens. With `deterministic`, shapes are fixed, so the bits of a
    request are independent of other requests. That is slower. Only stop strings need `decode`, a
    function from tokens to text.

    The K and V of ended requests stay in memory for `kept_slots` full sequences. The next request
    of the same session reads only the tokens that follow. A swap after an interruption drops them,
    and so does `kv_on_swap=recompute`. With `deterministic`, none are kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Sequence[int],
        slots: int,
        max_len: int,
        deterministic: bool = False,
        kv_on_swap: str = "keep",
        kept_slots: int = 0,
        version: PolicyVersion = 0,
        decode: Callable[[Tokens], str] | None = None,
    ) -> None:
        self.version = version
        self._model = model
        self._decoder = Decoder(
            model,
            eos_ids=eos_ids,
            slots=slots,
            max_len=max_len,
            deterministic=deterministic,
            # Kept K and V have other bits than those of a new read, and timing decides what stays.
            kept_slots=0 if deterministic else kept_slots,
        )
        self._table = self._decoder.table
        self._slots = slots
        self._max_len = max_len
        self._recompute = kv_on_swap == "recompute"
        self._interrupted = False
        """Whether requests were interrupted since the last swap."""
        self._kv_since = version
        """The oldest version whose K and V may be kept."""
        self._decode = decode
        self._queue: deque[Request] = deque()
        self._loop_task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._allocated = False
        self._asleep = False
        self._closed = False
        self._tokens = 0
        self._prefill_tokens = 0
        self._reused_tokens = 0
        self._cancelled_tokens = 0
        self._busy_slot_s = 0.0
        self._busy_since = 0.0
        gauge("tokens", lambda: self._tokens + self._prefill_tokens)

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """Generate a response, as the port describes.

        Raises DataError if `tokens` leave no room in max_len, and WorkerError if the engine is
        closed, asleep or has failed.
        """
        if self._failure is not None:
            raise WorkerError(
                f"the rollout engine's loop has failed: {self._failure!r}"
            ) from self._failure
        check_request(
            tokens,
            params,
            max_len=self._max_len,
            closed=self._closed,
            asleep=self._asleep,
            has_tokenizer=self._decode is not None,
        )
        request = Request(tokens, params, session, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._run(), name="decode loop")
            self._loop_task.add_done_callback(self._ended)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._forget(request)
            raise

    async def interrupt(self) -> None:
        """End every interruptible request, running or queued.

        All of their calls return before this returns.
        """
        self._interrupted = True
        ends = [r for r in self._table.running() if r.params.interruptible]
        queued = [r for r in self._queue if r.params.interruptible]
        self._queue = deque(r for r in self._queue if not r.params.interruptible)
        self._finish([(r, Stop.INTERRUPTED) for r in ends])
        for request in queued:
            _resolve(request, ())
        # The event loop has queued the callers before this task, so one yield lets them run.
        await asyncio.sleep(0)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the live parameters by name, in the model's order. Tied parameters appear once."""
        return dict(self._model.named_parameters())

    async def swap(self, version: PolicyVersion, staged: Mapping[str, torch.Tensor]) -> float:
        """Copy `staged` over the live weights, and return the seconds without decoding.

        Later tokens belong to `version`. Raises SyncError, and copies nothing, unless `staged` has
        exactly the names and shapes of the live weights, or if K and V of a forbidden version
        are kept.
        """
        start = perf_counter()
        check_kv(self._decoder.kept.oldest, self._kv_since, "version")
        live = self.weights()
        _check_staged(live, staged)
        with torch.inference_mode():
            for name, tensor in live.items():
                tensor.copy_(staged[name])
        before, self.version = self.version, version
        # After an interruption, responses read their tokens again with the new weights, and so do
        # idle sessions. Another run, which starts at version 0 again, has the same names.
        if self._recompute or self._interrupted or version <= before:
            self._decoder.kept.drop_all()
            if self._recompute or not self._table.running():
                self._kv_since = version
        self._kv_since = min(self._kv_since, version)
        self._interrupted = False
        running = self._table.running()
        for request in running:
            kv_version = version if self._recompute else request.kv_version
            request.at_version(self._table.drawn(request), version, kv_version)
        if self._recompute and running:
            self._decoder.read(running)
            self._prefill_tokens += sum(len(self._table.context(r)) for r in running)
        if any(tensor.is_cuda for tensor in live.values()):
            # The seconds are then correct, and the caller can reuse `staged`.
            torch.cuda.synchronize()
        return perf_counter() - start

    async def stats(self) -> RolloutStats:
        self._tick()
        return RolloutStats(
            self._tokens,
            self._prefill_tokens,
            self._busy_slot_s,
            self._slots,
            self._reused_tokens,
            self._decoder.kept.evicted_tokens,
            self._cancelled_tokens,
        )

    async def sleep(self, keep_weights: bool = True) -> None:
        """Free the KV cache; the weights stay in place.

        Raises WorkerError if a request is running or queued.
        """
        pending = self._pending()
        if pending:
            raise WorkerError(
                f"sleep() with {len(pending)} unfinished requests. "
                "Fix: drain or interrupt the engine first."
            )
        self._asleep, self._allocated = True, False
        self._decoder.free()

    async def wake_weights(self) -> None:
        """Do nothing: sleep() keeps the weights in place."""

    async def wake(self) -> None:
        self._asleep = False
        self._allocate()

    async def close(self) -> None:
        """Stop the loop. Unfinished requests fail with WorkerError."""
        self._closed = True
        if self._loop_task is not None:
            self._loop_task.cancel()
        self._fail(WorkerError("the rollout engine was closed before this request finished"))
        self._decoder.free()
        await asyncio.sleep(0)

    async def _run(self) -> None:
        """Serve requests until none is left. Yield to the event loop after each token."""
        self._allocate()
        while self._queue or self._table.live.any():
            self._step()
            await asyncio.sleep(0)
        # Reset before the task's callback runs: the next call must start a new task.
        self._loop_task = None

    def _step(self) -> None:
        self._tick()
        arrived = self._admit()
        ended = self._decoder.step(arrived, self.version)
        self._tokens += self._table.occupied
        self._prefill_tokens += sum(len(r.tokens) - r.reused for r in arrived)
        self._reused_tokens += sum(r.reused for r in arrived)
        if self._table.with_stop:
            # A string counts more than the limit: a window that ends with it does not go on.
            by_token = {r for r, stop in ended if stop is Stop.EOS}
            strings = [
                r for r in self._table.with_stop if r not in by_token and self._completes_stop(r)
            ]
            ended = [one for one in ended if one[0] not in strings]
            ended += [(r, Stop.STRING) for r in strings]
        if ended:
            self._finish(ended)
            if not self._queue:
                self._decoder.compact()

    def _admit(self) -> list[Request]:
        """Take requests from the front of the queue, limited by free slots and by one prefill."""
        arrived: list[Request] = []
        room = self._slots - self._table.occupied if self._queue else 0
        longest = 0
        while self._queue and len(arrived) < room:
            request = self._queue[0]
            request.kept, request.reused = self._decoder.kept.find(
                request.session, request.tokens, self.version
            )
            longest = max(longest, len(request.tokens) - request.reused)
            if arrived and longest * (len(arrived) + 1) > PREFILL_TOKENS:
                break
            arrived.append(self._queue.popleft())
        return arrived

    def _finish(self, ended: Sequence[tuple[Request, Stop]]) -> None:
        """Free the slots of ended requests and return their tokens to the callers."""
        self._tick()
        if not ended:
            return
        self._decoder.keep([r for r, _ in ended])
        drawn = self._table.release([r for r, _ in ended])
        for (request, stop), (tokens, log_probs) in zip(ended, drawn, strict=True):
            _resolve(request, request.segments(tokens, log_probs, stop))

    def _completes_stop(self, request: Request) -> bool:
        """Return whether the latest token completes a stop string."""
        assert self._decode is not None
        stop = request.params.stop
        # Only tokens of this response count, including those of earlier calls.
        own = self._table.drawn(request) + request.params.offset
        known = self._table.ids[request.slot, : self._table.position[request.slot] + 1]
        tail = tokens_of()
        tail.frombytes(known[max(len(known) - min(stop_window(stop), own), 0) :].tobytes())
        return completes_stop(tail, stop, self._decode)

    def _forget(self, request: Request) -> None:
        """Remove a request that its caller cancelled, from its slot or from the queue."""
        if request.slot >= 0:
            self._tick()
            self._cancelled_tokens += self._table.drawn(request)
            self._table.release([request])
        elif request in self._queue:
            self._queue.remove(request)

    def _pending(self) -> list[Request]:
        return [*self._table.running(), *self._queue]

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of the loop. If it failed, raise the error in every waiting call.

        The loop also ends when it is idle, and when close() cancels it.
        """
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
            self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        for request in self._pending():
            if not request.future.done():
                request.future.set_exception(error)
        self._queue.clear()

    def _allocate(self) -> None:
        if not self._allocated:
            self._decoder.allocate()
            self._allocated = True

    def _tick(self) -> None:
        """Add the time since the last `_tick` to the busy time of the occupied slots."""
        now = perf_counter()
        self._busy_slot_s += (now - self._busy_since) * self._table.occupied
        self._busy_since = now


def _resolve(request: Request, segments: tuple[Segment, ...]) -> None:
    if not request.future.done():  # it is done if the caller cancelled it since the last token
        request.future.set_result(segments)


def _check_staged(live: Mapping[str, torch.Tensor], staged: Mapping[str, torch.Tensor]) -> None:
    missing, unknown = live.keys() - staged.keys(), staged.keys() - live.keys()
    if missing or unknown:
        raise SyncError(
            "staged weights are not the model's: "
            f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
        )
    for name, tensor in live.items():
        if staged[name].shape != tensor.shape:
            raise SyncError(
                f"staged {name} has shape {tuple(staged[name].shape)}, "
                f"the model's has {tuple(tensor.shape)}"
            )


def build(
    sides: Sides,
    model: ModelConfig,
    model_folder: str,
    kind: type[TorchRolloutEngine] = TorchRolloutEngine,
) -> TorchRolloutEngine:
    """Return the engine of one replica, on this process's device, with the weights of version 0."""
    trainer, rollout, trust = sides.trainer, sides.rollout, model.trust_remote_code
    device = trainer.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(
        model_folder,
        seed=trainer.seed,
        dtype=model.dtype,
        device=device,
        trust_remote_code=trust,
    )
    return kind(
        loaded,
        eos_ids=folder_eos_ids(model_folder, trust_remote_code=trust),
        slots=rollout.max_num_seqs,
        max_len=rollout.max_len,
        deterministic=trainer.deterministic,
        kv_on_swap=rollout.kv_on_swap,
        kept_slots=rollout.session_kv_slots or 0,
        decode=text_of(model_folder, trust),
    )
