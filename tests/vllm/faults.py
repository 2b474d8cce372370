"""Faults inside vLLM's workers, and slow outputs, on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader import get_model

from millrace.serving.live_weights import LiveWeights
from millrace.serving.vllm.worker import WorkerExtension
from millrace.sync.ipc import IpcStaging
from tests.serving.faults import Faults
from tests.vllm.processes import WORKER_IN_CORE, engine_cores


class FaultyExtension(Faults, WorkerExtension):
    """millrace's extension of the workers, with faults for tests."""

    model_runner: Any

    @property
    def weights(self) -> LiveWeights:
        return self.weight_transfer_engine

    def double_scale(self, name: str) -> None:
        """Double the live scales of a weight in 8 bits behind the replica's back."""
        dict(self.model_runner.model.named_parameters())[f"{name}_scale"].data.mul_(2)

    def scale_wrongly(self, name: str, factor: float) -> None:
        """Give staged weights whose names begin so wrong scales. All sums agree on them."""
        engine = self.weights
        right = engine._in_eight_bits

        def wrong(weights: Any, into: Any = None) -> Any:
            found = right(weights, into)
            for scale in (key for key in found if key.startswith(name) and "_scale" in key):
                found[scale].mul_(factor)
            return found

        engine._in_eight_bits = wrong  # type: ignore[method-assign]
        if isinstance(engine.inbox, IpcStaging):
            engine.inbox._prepare = wrong

    def load_scales_in_another_order(self, name: str) -> None:
        """Let the next load exchange the scales of both parts of a fused weight."""
        engine, right = self.weights, self.weights.load

        def wrong() -> None:
            del engine.load
            right()
            scale = dict(self.model_runner.model.named_parameters())[f"{name}_scale"].data
            scale.copy_(scale.roll(len(scale) // 2, 0))

        engine.load = wrong  # type: ignore[method-assign]

    def hold_quantising(self) -> None:
        """Let the thread that stages a version wait, once, before it quantises."""
        engine, self.held = self.weights, threading.Event()

        def waits(weights: Any, into: Any = None) -> Any:
            self.held.wait(60)
            del engine._in_eight_bits
            return engine._in_eight_bits(weights, into)

        engine._in_eight_bits = waits  # type: ignore[method-assign]

    def go_on_quantising(self) -> None:
        self.held.set()

    def live_weights(self) -> dict[str, tuple[str, list[float]]]:
        """Return the dtype and the first numbers of each live parameter."""
        return {
            name: (str(p.dtype), p.T.flatten()[:8].tolist())
            for name, p in self.model_runner.model.named_parameters()
        }

    def linear_weights(self) -> int:
        """Return the count of numbers in the live parameters of linear layers.

        It is 0 if vLLM has packed them.
        """
        return sum(
            p.numel()
            for name, p in self.model_runner.model.named_parameters()
            if "proj.weight" in name
        )

    def dtypes_of_a_model(self, arguments: dict[str, Any]) -> list[str]:
        """Build the model of other engine arguments in this worker.

        Return the dtypes of its head and of the logits that it computes from a hidden state.
        """
        config = AsyncEngineArgs(**arguments).create_engine_config()
        with set_current_vllm_config(config), torch.inference_mode():
            model: Any = get_model(vllm_config=config)
            head = model.lm_head.weight.dtype
            logits = model.compute_logits(torch.zeros(1, model.config.hidden_size, dtype=head))
        return [str(head), str(logits.dtype)]


def plant(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let engines have the faults. Return the function that builds one."""
    from millrace.serving.vllm import arguments, engine

    patch.setattr(arguments, "EXTENSION", "tests.vllm.faults.FaultyExtension")

    def build(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as start:
            start.setenv(*WORKER_IN_CORE)
            return engine.build(*args)

    return build


def delay_outputs(engine: Any, seconds: float) -> Callable[[], None]:
    """Let outputs arrive late. Return a function that ends this.

    Outputs of the old version are then still in vLLM's queue when its scheduler pauses.
    """
    core = engine._llm.engine_core
    honest = core.get_output_async

    async def late() -> Any:
        await asyncio.sleep(seconds)
        return await honest()

    def end() -> None:
        core.get_output_async = honest

    core.get_output_async = late
    return end


cores = engine_cores
