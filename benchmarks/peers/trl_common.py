"""The rows, the record of steps, and the held-out scores of TRL's arms."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import problems
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

TASK, MODEL = os.environ["TASK"], os.environ["MODEL"]
SEED, STEPS, RESPONSE = (int(os.environ[name]) for name in ("SEED", "STEPS", "RESPONSE"))
MAIN = os.environ.get("RANK", "0") == "0"
COMMON = {
    "output_dir": "trl_out",
    "max_steps": STEPS,
    "seed": SEED,
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "weight_decay": 0.0,
    "bf16": True,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "top_k": 0,
    "num_generations": 8,
    "max_completion_length": RESPONSE,
    "temperature": 1.0,
    "top_p": 1.0,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}

KEPT = (
    "reward",
    "completions/mean_length",
    "sample/staleness_mean",
    "sample/dropped_stale_total",
    "perf/weight_sync_s",
)


def record(event: str, **fields: Any) -> None:
    if MAIN:
        with open(os.environ["EVENTS"], "a") as file:
            file.write(json.dumps({"event": event, "t": time.time(), **fields}) + "\n")


def rows(name: str) -> list[dict[str, Any]]:
    lines = Path(os.environ["WORK"], name).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [
        {
            "prompt": row["prompt"],
            "answer": row["reward_model"]["ground_truth"],
            "data_source": row["data_source"],
        }
        for row in found
    ]


def training_set() -> Dataset:
    found = rows("train.jsonl")
    random.Random(SEED).shuffle(found)
    return Dataset.from_list(found)


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL, padding_side="left")


class EventRecorder(TrainerCallback):  # type: ignore[misc]
    """Records the begin, if it is the last callback, and each step."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        record("begin")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if logs and "reward" in logs:
            tokens = logs.get("batch/trained_tokens_per_step")
            tokens = tokens or 256 * logs["completions/mean_length"]
            kept = {name: logs[name] for name in KEPT if name in logs}
            record("step", step=state.global_step, steps=1, tokens=round(tokens), **kept)


def held_out(trainer: Any) -> None:
    """Record the mean reward of two answers a problem, drawn in bf16 with the trained weights."""
    if not MAIN:
        return
    device = trainer.accelerator.device
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    tokens, asked = tokenizer(), [row for row in rows("val.jsonl") for _ in range(2)]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("lm_head" in name for name in missing), (missing, unexpected)
    model.tie_weights()
    model.to(device).eval()
    texts = [
        tokens.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in asked
    ]
    inputs = tokens(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    torch.manual_seed(SEED)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    limits = {"max_new_tokens": RESPONSE, "pad_token_id": tokens.pad_token_id}
    with torch.no_grad():
        drawn = model.generate(**inputs, **sampling, **limits)
    answers = tokens.batch_decode(
        drawn[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    scores: dict[str, list[float]] = {}
    for row, text in zip(asked, answers, strict=True):
        score = problems.compute_score(row["data_source"], text, row["answer"])
        scores.setdefault(row["data_source"], []).append(score)
    values = {f"val/{kind}/mean@2": sum(each) / len(each) for kind, each in scores.items()}
    record("val", values=values)
