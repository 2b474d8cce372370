"""Both engines of a configuration in this process, their proof, and the faults that it must find.

A fault is planted in a real engine, or in the weights that the trainer sends. What the checksums of
a sync see is right in every case.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from millrace.config import Config
from millrace.observe.gap import LEAST, LEAST_TF32, Verdict
from millrace.pipeline.proof import Limits, Proof
from millrace.pipeline.turns import turns_of
from millrace.ports import TransferReport
from millrace.replicas.pool import RolloutPool
from millrace.run.engines import sync_options
from millrace.runtime.worker import RolloutWorker, TrainWorker
from millrace.schedule.schedule import OnSync
from millrace.types import Prompt, SamplingParams, Segment, Tokens, tokens_of

Plant = Callable[["Engines"], contextlib.AbstractContextManager[None]]


class Sync:
    """A WeightSync between workers in this process."""

    def __init__(self, sender: Any, receiver: Any) -> None:
        self.sender, self._receiver = sender, receiver

    async def keep(self, version: int) -> None:
        raise NotImplementedError

    async def transfer(self, version: int) -> TransferReport:
        # A thread of its own: a sender may block its event loop until the receiver has answered.
        sending = asyncio.to_thread(lambda: asyncio.run(self.sender.transfer(version)))
        both = sending, self._receiver.transfer(version)
        return (await asyncio.gather(*both))[1]  # type: ignore[no-any-return]

    async def activate(self, version: int) -> float:
        return float(await self._receiver.activate(version))


class Failing(Exception):
    """A later probe has found a gap."""


@dataclass(slots=True)
class Engines:
    config: Config
    train: Any
    rollout: Any
    sync: Sync
    prompts: Any

    async def prove(
        self, seed: int = 0, budget_s: float = 20.0, note: Callable[[str], None] = lambda text: None
    ) -> Verdict:
        """Return the verdict on the engines. `seed` chooses prompts and requests."""
        c, pool = self.config, RolloutPool([self.rollout])
        on_gpu = self.train.device.type == "cuda"
        dtype = c.rollout.quantization or c.model.dtype
        least = LEAST_TF32 if on_gpu and dtype == "float32" else LEAST[dtype]
        rollout = c.rollout
        sizes = rollout.max_len, rollout.max_num_seqs
        schedule = c.schedule
        if self.rollout._recompute:
            schedule = replace(schedule, on_sync=OnSync.SWAP)
        most = c.guard.max_quantization_gap if rollout.quantization else None
        limits = Limits(dtype, least, *sizes, quantization=most)
        params = SamplingParams(rollout.max_response_length, rollout.temperature)

        def refuse(error: Exception) -> None:
            raise Failing(error)

        proof = Proof(
            *(self.train, pool, self.sync, turns_of(False, pool, self.train)),
            *(Shifted(self.prompts, 1000 * seed), params, schedule, limits),
            note=note, refuse=refuse, stops=False, budget_s=budget_s, seed=100_000 * seed,
        )  # fmt: skip
        verdict = await proof.run(0)
        assert verdict is not None
        return verdict


@dataclass
class Shifted:
    prompts: Any
    by: int

    def __getitem__(self, index: int) -> Prompt:
        found: Prompt = self.prompts[index + self.by]
        return found


@asynccontextmanager
async def engines(
    config: Config, folder: str, prompts: Any, *, rollout_folder: str | None = None
) -> AsyncIterator[Engines]:
    """Build both engines in this process, with the weights of `folder` on both sides.

    The rollout engine reads its config.json in `rollout_folder`, if there is one.
    """
    tree, train, rollout = config.model_dump(mode="json"), TrainWorker(), RolloutWorker()
    address = await train.listen()
    await train.build(tree, folder, 0, address)
    await train.engine.begin("rl", 100)
    await rollout.build(tree, rollout_folder or folder)
    try:
        where = sync_options(config), 0, address
        await asyncio.gather(train.connect(*where), rollout.connect(*where))
        assert rollout.receiver is not None
        await asyncio.gather(train.sender.regroup(1, [0]), rollout.receiver.regroup(1, [0]))
        sync = Sync(train.sender, rollout.receiver)
        await sync.transfer(0)
        await sync.activate(0)
        yield Engines(config, train.engine, rollout.engine, sync, prompts)
    finally:
        await rollout.engine.close()
        await train.engine.close()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@dataclass
class _Sending:
    """The trainer as its sender sees it. The independent model of a proof gets the true weights."""

    true: Any
    change: Callable[[str, Tensor], Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.true, name)

    def shards(self) -> Iterator[Any]:  # what NCCL and gloo send
        for name, shape, dtype, first, rows in self.true.shards():
            yield name, shape, dtype, first, self.change(name, rows)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:  # what CUDA IPC sends
        for name, tensor in self.true.full_weights():
            yield name, self.change(name, tensor)


def _sends(
    one: Engines, change: Callable[[str, Tensor], Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Let the trainer send changed weights. The engine proves that it has what was sent."""
    return patched(one.sync.sender, "_source", _Sending(one.train, change))


def _layers(one: Engines) -> int:
    return 1 + max(
        int(n.split("layers.")[1].split(".")[0]) for n, *_ in one.train.shards() if "layers." in n
    )


def unsynced_layer(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Send the weights of the middle layer as they were at the start."""
    part = f"layers.{_layers(one) // 2}."
    kept = {name: rows.clone() for name, _, _, _, rows in one.train.shards() if part in name}
    return _sends(one, lambda name, rows: kept.get(name, rows))


def head_transposed(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Exchange the first two query heads of the middle layer."""
    part = f"layers.{_layers(one) // 2}.self_attn.q_proj.weight"
    heads = json.loads((Path(one.train.model_folder) / "config.json").read_text())[
        "num_attention_heads"
    ]

    def change(name: str, rows: Tensor) -> Tensor:
        if part not in name:
            return rows
        by_head = rows.clone().view(heads, -1, rows.shape[1])
        by_head[[0, 1]] = by_head[[1, 0]]
        return by_head.view_as(rows)

    return _sends(one, change)


def temperature(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Draw at 0.9 times the temperature of the run."""
    generate = one.rollout.generate

    async def colder(tokens: Tokens, params: SamplingParams, session: str) -> tuple[Segment, ...]:
        found: tuple[Segment, ...] = await generate(
            tokens, replace(params, temperature=0.9 * params.temperature), session
        )
        return found

    return patched(one.rollout, "generate", colder)


def untied_head(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Give the engine a head of its own, which no sync reaches."""
    import torch

    head = one.rollout._model.lm_head
    own = torch.nn.Parameter(head.weight.detach().clone())

    def forward(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, own)

    return patched(head, "forward", forward)


def mask(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Hide the last token of a context before the one that is read."""
    cache = one.rollout._decoder.cache
    opened = cache.open
    return patched(cache, "open", lambda slots, lengths: opened(slots, lengths - 2))


@contextmanager
def old_kv(one: Engines) -> Iterator[None]:
    """Keep KV of old weights for new requests, as if the new ones had computed it."""
    if hasattr(one.rollout, "_salts"):
        from millrace.serving import requests

        with patched(requests.ActiveRequest, "begin", _without_salt(requests)):
            yield
        return
    kept = one.rollout._decoder.kept
    find = kept.find

    def fresh(session: str, tokens: Tokens, version: int) -> Any:
        for context in list(kept._order):
            object.__setattr__(context, "version", version)
        return find(session, tokens, version)

    with patched(kept, "drop_all", lambda: None), patched(kept, "find", fresh):
        yield


def _without_salt(requests: Any) -> Any:
    def begin(self: Any, salts: Any, swaps: int, version: int) -> None:
        self.salt = requests.Salt(0, version)
        self.starts, self.drawn = [requests.Start(0, version, version)], 0

    return begin


@contextmanager
def old_kv_recompute(one: Engines) -> Iterator[None]:
    """Let running requests keep the KV of old weights under kv_on_swap=recompute."""
    read = patched(one.rollout._decoder, "read", lambda requests: None)
    with patched(one.rollout, "_recompute", True), read:
        yield


Change = Callable[[dict[str, Any]], None]


@contextmanager
def changed(folder: str, change: Change) -> Iterator[str]:
    """Yield a copy of a model folder with a changed config.json."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        path = Path(copy) / "config.json"
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))
        yield copy


def rope(tree: dict[str, Any]) -> None:
    """Halve the base of rope."""
    parameters = tree.get("rope_parameters") or tree
    parameters["rope_theta"] = 0.5 * parameters.get("rope_theta", 10_000.0)


def window(tree: dict[str, Any]) -> None:
    """Let a Llama's attention see the last 64 tokens alone."""
    tree |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}


def own_head(tree: dict[str, Any]) -> None:
    """Give a model with a tied head a head of its own, which no sync reaches."""
    tree["tie_word_embeddings"] = False


def top_k(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Draw from the 16 likeliest tokens. The log-probs are those of the full distribution."""
    generate = one.rollout.generate

    async def cut(tokens: Tokens, params: SamplingParams, session: str) -> tuple[Segment, ...]:
        found: tuple[Segment, ...] = await generate(tokens, replace(params, top_k=16), session)
        return found

    return patched(one.rollout, "generate", cut)


def rounded_keys(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Round the keys of the middle layer to bfloat16 in a run in float32."""
    project = one.rollout._model.model.layers[_layers(one) // 2].self_attn.k_proj
    forward = project.forward
    return patched(project, "forward", lambda x: forward(x).bfloat16().to(x.dtype))


def shared_page(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Let a page of a session's kept KV belong to the next session, too."""
    kept = one.rollout._decoder.kept
    keep = kept.keep

    def twice(session: str, tokens: Any, version: int) -> Any:
        found = keep(session, tokens, version)
        if found is not None and len(found.pages) > 1:
            kept._free.append(int(found.pages[0]))
        return found

    return patched(kept, "keep", twice)


def shifted_extension(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Shift the positions of tokens that are read after kept KV by one."""
    from millrace.decode import decoder

    plan = decoder.plan_extension

    def shifted(*args: Any) -> Any:
        found = plan(*args)
        return found and replace(found, positions=found.positions + 1)

    return patched(decoder, "plan_extension", shifted)


def late_rope(one: Engines) -> contextlib.AbstractContextManager[None]:
    """Scale the positions in the last fifth of the longest context."""
    rope, start = one.rollout._model.model.rotary_emb, 0.8 * one.config.rollout.max_len
    forward = rope.forward

    def scaled(x: Tensor, position_ids: Tensor) -> Any:
        return forward(x, position_ids.clamp(max=start) + (position_ids - start).clamp(min=0) / 2)

    return patched(rope, "forward", scaled)


ANY: dict[str, Plant] = {
    "one layer's weights not synced": unsynced_layer,
    "a head transposed": head_transposed,
    "temperature 0.9 on one side": temperature,
    "KV of old weights in the prefix cache": old_kv,
}
"""Faults of any engine."""
TORCH: dict[str, Plant] = {
    "a tied head loaded untied": untied_head,
    "attention mask off by one": mask,
    "KV of old weights under recompute": old_kv_recompute,
    "draws from the likeliest tokens alone": top_k,
    "keys of one layer in bfloat16": rounded_keys,
    "a page of kept KV in two sessions": shared_page,
    "positions after kept KV off by one": shifted_extension,
}
"""Faults of the torch engine."""
LONG: dict[str, Plant] = {"rope wrong at the last positions": late_rope}
"""Faults of long responses, which the configuration must allow."""
CONFIG: dict[str, Change] = {"RoPE base wrong": rope}
"""Faults of the config.json that the rollout engine reads."""
VLLM: dict[str, Change] = {
    "a tied head loaded untied": own_head,
    "attention sees 64 tokens alone": window,
}
"""More of them, for vLLM."""


_QUESTIONS = (
    "What is {a} times {b}?",
    "Write a sentence with the number {a} and the number {b}.",
    "Name {a} things that are smaller than a house.",
    "What is {a} + {b} + {a}? Explain your steps.",
)


class ChatPrompts:
    """Questions in the chat template of a model, or random tokens without a tokenizer."""

    def __init__(self, folder: str, vocabulary: int) -> None:
        from transformers import AutoTokenizer

        has = (Path(folder) / "tokenizer_config.json").is_file()
        self._tokenizer = AutoTokenizer.from_pretrained(folder) if has else None
        self._vocabulary = vocabulary

    def __getitem__(self, index: int) -> Prompt:
        dice = random.Random(index)
        if self._tokenizer is None:
            ids = [dice.randrange(2, self._vocabulary) for _ in range(dice.randint(4, 24))]
            return Prompt(index, tokens_of(ids), "", "proof")
        text = dice.choice(_QUESTIONS).format(a=dice.randint(2, 99), b=dice.randint(2, 99))
        message = [{"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(message, add_generation_prompt=True)
        ids = ids["input_ids"] if hasattr(ids, "keys") else ids
        return Prompt(index, tokens_of(ids), text, "proof")


def small_model(folder: str, heads: int = 4) -> None:
    """Write a random model with scaled weights, so that a permuted context moves log-probs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=heads,
        num_key_value_heads=heads // 2, intermediate_size=128, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
