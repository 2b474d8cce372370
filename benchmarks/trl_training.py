"""The training with TRL that bench_trl.py compares, and the rewards of both arms."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

RECIPE = "quickstart"
PROBLEMS, GROUP = 32, 8


async def fast(
    prompts: Sequence[str], completions: Sequence[str], ground_truth: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for the right answer, at once."""
    return [float(c.strip() == t) for c, t in zip(completions, ground_truth, strict=True)]


async def slow(
    prompts: Sequence[str], completions: Sequence[str], ground_truth: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for each right answer, after 0.2 s to 0.5 s that depend on the text.

    All completions of a call wait together.
    """

    async def one(prompt: str, completion: str, truth: str) -> float:
        await asyncio.sleep(0.2 + 0.3 * crc32((prompt + completion).encode()) / 2**32)
        return float(completion.strip() == truth)

    return list(
        await asyncio.gather(
            *(one(*row) for row in zip(prompts, completions, ground_truth, strict=True))
        )
    )


REWARDS = {"plain": fast, "slow": slow}


def run_trl(model_folder: str, case: str, steps: int, seed: int, threads: int, out: str) -> None:
    """Train with TRL and print one JSON object."""
    import torch

    torch.set_num_threads(threads)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from millrace.config import recipe
    from millrace.models.tokenizer import load_tokenizer
    from millrace.run import problems

    config = recipe.load(RECIPE, [f"model.path={model_folder}", f"trainer.seed={seed}"])
    stream = problems.prepare(config, problems.load(config), Path(model_folder)).train
    rows = [stream[i] for i in range(steps * PROBLEMS)]  # millrace's problems in millrace's order
    data = Dataset.from_list([{"prompt": r.text, "ground_truth": r.ground_truth} for r in rows])
    rewards: list[float] = []
    ends: list[float] = []
    start = 0.0
    function = REWARDS[case]

    async def reward(**columns: Any) -> list[float]:
        scores = await function(**columns)
        rewards.append(sum(scores) / len(scores))
        return scores

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            nonlocal start
            start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter() - start)

    actor, optim = config.actor, config.actor.optim
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
        reward_funcs=reward,  # type: ignore[arg-type,unused-ignore]  # TRL awaits coroutines, its types lack them
        train_dataset=data,
        processing_class=load_tokenizer(model_folder),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=f"{out}/trl",
            use_cpu=True,
            bf16=False,
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=PROBLEMS * GROUP,
            num_generations=GROUP,
            shuffle_dataset=False,
            max_completion_length=config.rollout.max_response_length,
            temperature=config.rollout.temperature,
            top_p=1.0,
            top_k=0,
            learning_rate=optim.lr,
            warmup_steps=optim.lr_warmup_steps,
            lr_scheduler_type="warmup_stable_decay",  # like the recipe: a warm-up, then linear
            lr_scheduler_kwargs={
                "num_decay_steps": steps - optim.lr_warmup_steps,
                "min_lr_ratio": optim.min_lr_ratio,
                "decay_type": "linear",
            },
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            max_grad_norm=optim.clip_grad,
            epsilon=actor.clip_ratio_low,
            epsilon_high=actor.clip_ratio_high,
            beta=0.0,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
        ),
    )
    trainer.train()
    trainer.save_model(out)
    print(json.dumps({"seconds": ends[-1], "ends": ends, "rewards": rewards}))
