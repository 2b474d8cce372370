"""The adapter cases that the tests run at every number of ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from millrace.config import Config
from millrace.models.model import load_model
from millrace.train.fsdp import lora
from millrace.train.fsdp.engine import build
from millrace.train.fsdp.policy import PackedPolicy
from tests.train import cases as train_cases
from tests.train.cases import HORIZON, LAYOUTS, OPTIM

RANK, ALPHA = 4, 6.0
CASES = {
    name: train_cases.CASES[name] | {"on": layouts}
    for name, layouts in {
        "many micro-batches": ["2", "2 x 2"],
        "short last mini-batch, two epochs, own old log-probs": ["3", "1 of 4"],
    }.items()
}


def config_of(case: Any, layout: Any = "1", **sections: Any) -> Any:
    tree = train_cases.config_of(case, layout).model_dump()
    tree["model"] |= {"lora_rank": RANK, "lora_alpha": ALPHA}
    for section, values in sections.items():
        tree[section] |= values
    return Config.model_validate(tree)


def loaded(case: Any, folder: str) -> Any:
    return load_model(
        f"{folder}/{'tied' if case.get('tied', True) else 'untied'}", seed=1, dtype="float32"
    )


def engine_of(case: Any, folder: str, rank: Any, layout: Any) -> Any:
    """Build an engine with adapters in float64."""
    config = config_of(case, layout)
    model = lora.inject(loaded(case, folder), config.model, config.trainer.seed).double()
    return train_cases.sharded_engine(PackedPolicy(model), config, folder, rank, layout)


def plain_model(case: Any, folder: str) -> Any:
    """Build peft's own model in float64; its adapters are drawn from the same seed as ours."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config_of(case).trainer.seed + 1)
        settings = LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,  # type: ignore[arg-type]
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        return get_peft_model(loaded(case, folder), settings).double()


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def base_of(engine: Any) -> Any:
    return {name: whole(tensor) for name, tensor in lora.base_weights(engine.policy.model)}


def adapters_of(engine: Any) -> Any:
    return {name: whole(tensor) for name, tensor in lora.adapters(engine.policy.model)}


def run_case(case: Any, folder: str, rank: Any, layout: Any = "1") -> dict[str, Any]:
    engine = engine_of(case, folder, rank, layout)
    reports = [asyncio.run(engine.step(batch)) for batch in train_cases.batches_of(case)]
    rows = {name: (shape, first, own.clone()) for name, shape, _, first, own in engine.adapters()}
    return {
        "metrics": [r.metrics for r in reports],
        "base": base_of(engine),
        "adapters": adapters_of(engine),
        "rows": rows,
        "merged": dict(engine.full_weights()),
    }


def with_reference(folder: str, rank: Any = 0, layout: Any = "1", **sections: Any) -> Any:
    """Build a float32 engine as a user does, with the KL to the reference and a critic."""
    config = config_of(
        {},
        layout,
        **({"actor": {"use_kl_loss": True}, "algorithm": {"adv_estimator": "gae"}} | sections),
    )
    engine = build(config, f"{folder}/tied", rank=rank, world_size=LAYOUTS[layout][0])
    engine.restart(OPTIM, HORIZON)
    return engine


def run_extra(folder: str, rank: Any) -> dict[str, Any]:
    """Run a batch, a checkpoint, an export and one more batch; return the states.

    `start` shows the weights on this rank after only rank 0 loaded them.
    """
    engine = with_reference(folder, rank, "2")
    start = {"base": base_of(engine), "adapters": adapters_of(engine)}
    batches = train_cases.batches_of({})
    asyncio.run(engine.step(batches[0]))
    asyncio.run(engine.save(f"{folder}/checkpoint"))
    asyncio.run(engine.export(f"{folder}/export"))
    exported, adapters = dict(engine.full_weights()), adapters_of(engine)
    last = asyncio.run(engine.step(batches[1])).metrics
    return {
        "start": start,
        "exported": exported,
        "adapters": adapters,
        "last": last,
        "weights": dict(engine.full_weights()),
    }


def run_copies(folder: str, rank: Any) -> dict[str, Any]:
    """Run two copies of the model on four ranks.

    They resume from the checkpoint of two ranks and save a checkpoint of their own.
    """
    engine = with_reference(folder, rank, "2 x 2")
    asyncio.run(engine.load(f"{folder}/checkpoint"))
    last = asyncio.run(engine.step(train_cases.batches_of({})[1])).metrics
    asyncio.run(engine.save(f"{folder}/checkpoint of copies"))
    return {
        "last": last,
        "adapters": adapters_of(engine),
        "weights": dict(engine.full_weights()),
        "base": engine.base_sum,
    }
