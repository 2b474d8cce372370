"""The SGLang rollout engine: one replica of SGLang's Engine.

SGLang's schedulers run in processes of their own. `scheduler.py` is millrace's part of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import mmap
import os
import signal
import struct
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import psutil
import zmq.asyncio
from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    RpcReqInput,
    async_sock_recv,
    async_sock_send,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from millrace import errors
from millrace.config import ModelConfig, RolloutConfig, Sides
from millrace.config.serving_checks import SCRATCH
from millrace.errors import ConfigError, ReplicaLost, WorkerError, bad_value
from millrace.extras.sglang import scheduler
from millrace.extras.sglang.arguments import engine_arguments
from millrace.models.model import folder_eos_ids
from millrace.models.tokenizer import text_of
from millrace.process.death import ignore_stop_signals
from millrace.process.trees import lives
from millrace.serving.engine import ServingEngine
from millrace.serving.live_weights import keep_nccl_settings, restore_nccl_settings
from millrace.serving.log import WorkerLog
from millrace.serving.requests import ActiveRequest, Drawn, experts_of, stop_string_end
from millrace.types import Floats, Tokens, floats_of, tokens_of
from millrace.waits.registry import current, waiting

_DEAD = "SGLang's scheduler has died"
_POLL_S = 1.0
_IDLE_POLL_S = 0.002
_ABORT_S = 0.001


class _Manager(TokenizerManager):  # type: ignore[misc]
    """SGLang's client of the schedulers. It ignores an abort of a request that it has not sent."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: dict[str, bool] = {}
        """The requests that were sent and have no result yet, and whether they were aborted."""
        self.sends = 0

    def _send_one_request(self, request: Any) -> Any:
        sending = super()._send_one_request(request)
        self.sent[request.rid] = False
        self.sends += 1
        return sending  # a coroutine in 0.5.23

    def abort_once(self, name: str) -> None:
        """Abort a request if the schedulers have it and it was not aborted before."""
        if self.sent.get(name) is False:
            self.sent[name] = True
            self.abort_request(name)


def _manager(server_args: Any, port_args: Any) -> Any:
    return init_tokenizer_manager(server_args, port_args, _Manager)


class _Engine(Engine):  # type: ignore[misc]
    """SGLang's engine, with millrace's schedulers and without a process that makes text."""

    init_tokenizer_manager_func = staticmethod(_manager)
    run_scheduler_process_func = staticmethod(scheduler.run)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
        return [], []


class SglangRolloutEngine(ServingEngine):
    """A ServingEngine with SGLang's Engine.

    A token is drawn by the request's seed and the token's position. So a resumed response
    continues with the random numbers of an uninterrupted one.
    """

    name = "SGLang"

    def __init__(self, engine: Engine, counter: mmap.mmap, log: WorkerLog, **settings: Any) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._counter = counter
        self._log = log
        self._processes = [psutil.Process(pid) for pid in engine.get_all_child_pids()]
        self._counts: dict[str, int] = {}
        """The drawn tokens of each request at the last pause, by SGLang's id."""
        self._socket = zmq.asyncio.Socket(engine.send_to_rpc)
        self._answers: dict[int, asyncio.Future[list[Any]]] = {}
        self._receiving = asyncio.get_running_loop().create_task(self._receive(), name="answers")
        self._failed = False
        super().__init__(**settings)
        self._take_signals()

    def _take_signals(self) -> None:
        """Replace SGLang's handlers, which end this process with all of its children."""
        self._manager._subprocess_watchdog.stop()
        self._manager.auto_create_handle_loop()
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        loop.add_signal_handler(signal.SIGQUIT, self._fail)  # a scheduler sends it at an error
        ignore_stop_signals()

    def _fail(self) -> None:
        self._failed = True

    def _failure(self) -> str | None:
        if self._failed or not all(map(lives, self._processes)):
            return f"{_DEAD}: {self._log.last_error() or 'the log of the worker has the reason'}"
        return None

    async def join_sync(self, init_info: dict[str, Any]) -> None:
        await self.call_workers("join", *map(init_info.get, ("host", "port", "replica", "agreed")))

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every SchedulerExtension between two steps. Return the results."""
        self.check_alive()  # a call to a dead scheduler would wait for its socket
        number = next(self._numbers)
        call = {"number": number, "method": method, "args": json.dumps(args)}
        await async_sock_send(self._socket, RpcReqInput(method=scheduler.METHOD, parameters=call))
        answering = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            with waiting(f"{current().registry.name}-core-*|SGLang's scheduler", "its answer"):
                while not (await asyncio.wait([answering], timeout=_POLL_S))[0]:
                    self.check_alive()
        finally:
            del self._answers[number]
        reports = answering.result()
        for report in reports:
            if "error" in report:
                kind = getattr(errors, report["type"], WorkerError)
                raise kind(f"{method}: {report['error']}")
        return [report["value"] for report in reports]

    async def _receive(self) -> None:
        """Give each answer of the scheduler to its call, which may have been cancelled."""
        while True:
            answer = await async_sock_recv(self._socket)
            number, reports = json.loads(answer.message)
            if (answering := self._answers.get(number)) and not answering.done():
                answering.set_result(reports)

    async def _result(self, request: ActiveRequest) -> Drawn:
        drawing = asyncio.ensure_future(self._collect(request))
        try:
            while not (await asyncio.wait([drawing], timeout=_POLL_S))[0]:
                if failure := self._failure():
                    raise ReplicaLost(failure)
            return drawing.result()
        finally:
            drawing.cancel()
            self._manager.sent.pop(request.id, None)

    async def _collect(self, request: ActiveRequest) -> Drawn:
        params = request.params
        sent = GenerateReqInput(
            rid=request.id,
            input_ids=request.tokens.tolist(),
            sampling_params=self._sampling_params(request),
            return_logprob=True,
            extra_key=str(request.salt.number),
            return_routed_experts=params.experts_from is not None,
            routed_experts_start_len=params.experts_from or 0,
            stream=bool(params.stop),
        )
        checked = end = 0
        output: dict[str, Any] = {}
        async with contextlib.aclosing(self._manager.generate_request(sent)) as outputs:
            # There is one output at the end, or with stop strings one for each token.
            async for output in outputs:
                if params.stop and not end:
                    assert self._decode is not None
                    drawn = tokens_of(output["output_ids"])
                    end = stop_string_end(request, drawn, checked, self._decode)
                    checked = len(drawn)
                    if end:
                        self._manager.abort_once(request.id)
        tokens, log_probs = _drawn(output)
        about = output["meta_info"]
        reason = about["finish_reason"]["type"]
        if reason == "abort":  # the last token may have no log-prob yet
            tokens, log_probs = tokens[: len(log_probs)], log_probs[: len(tokens)]
        elif len(tokens) != len(log_probs):
            raise WorkerError(
                f"SGLang returned {len(tokens)} tokens and {len(log_probs)} log-probs of a response"
            )
        if tokens:
            self._read(request, about.get("cached_tokens", 0))
        if end:
            self._cancelled += len(tokens) - end
            tokens, log_probs, reason = tokens[:end], log_probs[:end], "string"
        request.drawn = len(tokens)
        experts = experts_of(request, b64decode(about.get("routed_experts", "")), len(tokens))
        return Drawn(tokens, log_probs, reason, experts)

    def _sampling_params(self, request: ActiveRequest) -> dict[str, Any]:
        params = request.params
        return {
            "max_new_tokens": min(params.max_tokens, self._max_len - len(request.tokens)),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "sampling_seed": params.seed % (1 << 63),
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": [] if params.ignore_eos else self._eos,
        }

    async def _abort(self, requests: list[ActiveRequest]) -> None:
        for request in requests:
            self._manager.abort_once(request.id)
        await asyncio.sleep(_ABORT_S)

    async def _cancel(self, request: ActiveRequest, drawing: asyncio.Future[Drawn]) -> None:
        while not drawing.done():
            await self._abort([request])
        if (error := drawing.exception()) and not isinstance(error, ReplicaLost | WorkerError):
            raise error

    def _count(self, request: ActiveRequest) -> int:
        return self._counts.get(request.id, 0)

    def _runs(self, request: ActiveRequest) -> bool:
        return request.id in self._counts

    def _drawn(self) -> int:
        return int(struct.unpack_from("q", self._counter)[0])

    async def _pause(self) -> float:
        while any(name not in self._manager.sent for name in self._active):  # noqa: ASYNC110
            await asyncio.sleep(0)
        anew = str(self._swaps + 1) if self._recompute else None
        counts = None
        while counts is None:
            counts = (await self.call_workers("pause", anew, self._manager.sends))[0]
        self._counts = counts
        return perf_counter()

    def _change_version(self) -> list[ActiveRequest]:
        if self._recompute:  # `pause` gave them this name in the prefix cache
            for request in self._active.values():
                request.salt = request.salt._replace(number=self._swaps)
        return super()._change_version()

    async def _resume(self) -> None:
        await self.call_workers("resume")

    async def _free(self, keep_weights: bool) -> None:
        # SGLang dies if a step is under way.
        while not all(await self.call_workers("is_idle")):  # noqa: ASYNC110 - no event
            await asyncio.sleep(_IDLE_POLL_S)
        if keep_weights:
            await self.call_workers("keep_weights")
        await self._manager.release_memory_occupation(
            ReleaseMemoryOccupationReqInput(tags=["weights", "kv_cache"])
        )

    async def _allocate(self, tags: list[str]) -> None:
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
        if "weights" in tags:
            await self.call_workers("restore_weights")

    async def _stop(self) -> None:
        self._receiving.cancel()
        await asyncio.to_thread(self._engine.shutdown)


def _drawn(output: dict[str, Any]) -> tuple[Tokens, Floats]:
    log_probs = output["meta_info"].get("output_token_logprobs") or ()
    return tokens_of(output["output_ids"]), floats_of(entry[0] for entry in log_probs)


def _leave_to_caller(*_: Any) -> None:
    """Do nothing at SIGQUIT, which a scheduler sends if it does not start. `build` raises then."""


def _small_cache(rollout: RolloutConfig, longest: int) -> ConfigError:
    """Return the error of a KV cache that one sequence of max_len does not fit."""
    key, value = "rollout.gpu_memory_utilization", rollout.gpu_memory_utilization
    if tokens := rollout.engine_kwargs.get("max_total_tokens"):
        key, value = "rollout.engine_kwargs.max_total_tokens", tokens
    rule = (
        f"SGLang's KV cache has room for {longest} tokens of a request, and one of this run may "
        f"have {rollout.max_len - 1} before its last"
    )
    return bad_value(key, value, rule, "a larger value, or a smaller rollout.max_response_length")


@contextlib.contextmanager
def _files_in(folder: str | None) -> Iterator[None]:
    """Let SGLang make its sockets in this folder. It leaves them behind."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def build(sides: Sides, model: ModelConfig, model_folder: str) -> SglangRolloutEngine:
    """Build one replica's engine on this process's devices, with random weights until a sync."""
    arguments = engine_arguments(sides, model, model_folder)
    rollout, log = sides.rollout, WorkerLog()
    keep_nccl_settings()
    os.umask(0o077)  # SGLang's sockets carry pickles, so they are the user's alone
    if arguments["device"] == "cpu" and arguments["tp_size"] > 1:  # it asks for each rank's cores
        cores = itertools.islice(itertools.cycle(os.sched_getaffinity(0)), arguments["tp_size"])
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    with _files_in(os.environ.get(SCRATCH)), tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        counter = mmap.mmap(file.fileno(), 8)
        os.environ[scheduler.COUNTER] = file.name
        try:
            engine = _Engine(**arguments, custom_sigquit_handler=_leave_to_caller)
        except Exception as error:  # also of arguments that SGLang does not expect
            cause = log.last_error() or f"{type(error).__name__}: {error}"
            given = rollout.engine_kwargs
            hint = f". It has rollout.engine_kwargs = {given}" if given else ""
            raise WorkerError(f"SGLang did not start: {cause}{hint}") from error
        finally:
            restore_nccl_settings()  # SGLang adds its own to those of this process
    if (longest := engine.tokenizer_manager.max_req_input_len) < rollout.max_len - 1:
        engine.shutdown()
        raise _small_cache(rollout, longest)
    return SglangRolloutEngine(
        engine,
        counter,
        log,
        eos_ids=folder_eos_ids(model_folder, trust_remote_code=model.trust_remote_code),
        slots=rollout.max_num_seqs,
        max_len=rollout.max_len,
        kv_on_swap=rollout.kv_on_swap,
        can_sleep=arguments["enable_memory_saver"],
        decode=text_of(model_folder, model.trust_remote_code),
    )
