"""A serving engine and a trainer of one rank."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore
from transformers import PretrainedConfig

from millrace.config import Config, ModelShape
from millrace.models.model import load_model, write_shape
from millrace.run.engines import sync_options
from millrace.runtime.worker import _VARIABLES, _set_defaults
from millrace.serving.receiver import EngineReceiver
from millrace.sync.collective import join_sender
from millrace.sync.table import Shards
from millrace.testing import joined
from millrace.types import Segment
from tests.serving.engine import ENGINE
from tests.sync.fleet import regroup

EOS, VOCABULARY, LENGTH = 1, 48, 256
TENSOR = int(os.environ.get("MILLRACE_TENSOR", "1"))
"""Ranks of each engine. `MILLRACE_TENSOR=2` runs all tests of this folder with two."""
SHAPE = ModelShape(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=TENSOR,
    intermediate_size=96,
)
PROMPT = [3 + i * 7 % 40 for i in range(150)]
"""A prompt longer than one block of vLLM's KV cache on CPUs, so its prefix is cached."""


class Replica:
    """A serving engine and a trainer of one rank, on one event loop for all tests."""

    device = torch.device("cpu")

    def __init__(
        self,
        folder: Path,
        model: PretrainedConfig | None = None,
        rollout: Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        """Make the models of a configuration, or of SHAPE. `keys` are those of the model section."""
        if model is None:
            write_shape(folder, SHAPE, vocab_size=VOCABULARY, eos_token_id=EOS, pad_token_id=0)
        else:
            model.save_pretrained(folder)
        self.folder = folder
        dtype = keys.get("dtype", "float32")
        self.models = {seed: load_model(folder, seed=seed, dtype=dtype) for seed in (1, 2, 3)}
        for made in self.models.values():
            with (
                torch.no_grad()
            ):  # sharper logits: the likely tokens of one model are unlikely for another
                made.get_parameter("model.norm.weight").mul_(4)
        self.current = self.models[1]
        self.config = Config.model_validate(
            {
                "model": {"path": str(folder)} | keys,
                "rollout": {
                    "engine": ENGINE,
                    "max_num_seqs": 16,
                    "max_num_batched_tokens": 2 * LENGTH,
                    "max_prompt_length": LENGTH,
                    "max_response_length": LENGTH,
                    "tensor_model_parallel_size": TENSOR,
                    "n_gpus_per_node": TENSOR,
                    **(rollout or {}),
                },
                "actor": {"ppo_max_token_len_per_gpu": 2 * LENGTH},
                "sync": {"timeout_s": 60},
            }
        )

    def shards(self) -> Shards:
        yield from (
            (name, tuple(p.shape), p.dtype, 0, p.detach())
            for name, p in self.current.named_parameters()
        )

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("a transfer between devices gathers nothing")

    async def start(self, patch: pytest.MonkeyPatch) -> None:
        _set_defaults(_VARIABLES[ENGINE], str(self.folder))
        # The engine's own processes must be the first to import some modules.
        faults = importlib.import_module(f"tests.{ENGINE}.faults")
        self.cores: Callable[[], list[psutil.Process]] = faults.cores
        build = faults.plant(patch)
        self.engine = build(self.config.sides, self.config.model, str(self.folder))
        await self.engine.call_workers("set_nccl", {"NCCL_PROTO": "Simple", "NCCL_IB_HCA": "x"})
        await self.join()

    def delay_outputs(self, seconds: float) -> Callable[[], None]:
        """Let outputs arrive late. Return a function that ends this."""
        faults = importlib.import_module(f"tests.{ENGINE}.faults")
        return faults.delay_outputs(self.engine, seconds)  # type: ignore[no-any-return]

    async def retract(self) -> None:
        """Let SGLang put all requests back into its queue. vLLM has no such call."""
        if ENGINE == "sglang":
            await self.engine.call_workers("retract")
            await self.engine.call_workers("resume")

    async def join(self) -> None:
        """Connect the trainer and the engine, which may have had another trainer before."""
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        address, agreed = ("127.0.0.1", self.store.port), sync_options(self.config)
        self.sender, self.receiver = await asyncio.gather(
            join_sender(self, self.store, 0, agreed),  # type: ignore[arg-type]
            EngineReceiver.join(self.engine, self.store, address, 0, agreed),
        )
        await regroup([self.sender], {0: self.receiver})

    async def transfer(self, version: int, seed: int) -> None:
        self.current = self.models[seed]
        send = asyncio.to_thread(asyncio.run, self.sender.transfer(version))
        sent, received = await asyncio.gather(send, self.receiver.transfer(version))
        assert sent.bytes == received.bytes > 0

    async def publish(self, version: int, seed: int) -> float:
        await self.transfer(version, seed)
        return await self.receiver.activate(version)

    def log_probs(
        self, seed: int, prompt: list[int], tokens: Any, temperature: float = 1.0
    ) -> torch.Tensor:
        """Return log p(token) under a model, from one whole forward pass."""
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            logits = self.models[seed](ids).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)


def gap(
    replica: Replica,
    seed: int,
    prompt: list[int],
    segments: tuple[Segment, ...],
    temperature: float = 1.0,
) -> list[float]:
    """Return, for each segment, the largest distance of its log-probs from the model's."""
    tokens = joined(segments)
    exact = replica.log_probs(seed, prompt, tokens, temperature)
    ends, at = [], 0
    for segment in segments:
        said = torch.tensor(segment.log_probs)
        ends.append(float((said - exact[at : at + len(said)]).abs().max()))
        at += len(said)
    return ends
