"""Add noise to a model until its held-out score is a share of what it was, for benchmarks/teachers.sh.

    python benchmarks/damage.py RECIPE MODEL FOLDER [SHARE] [SEED]

Each matrix W becomes W + scale x rms(W) x noise, with one scale for all, found by bisection. The
score is that of one sampled response to each held-out problem of the recipe. It prints a line of
JSON for each scale that it tries.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.config import recipe
from millrace.rewards.builtin import default
from millrace.run import problems

TRIES = 8


def main(name: str, path: str, folder: str, share: str = "0.5", seed: str = "0") -> None:
    config = recipe.load(name, [f"model.path={path}", "trainer.device=cpu"])
    with TemporaryDirectory() as made:
        held_out = problems.prepare(config, problems.load(config), Path(made) / "model").val
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    whole = {n: p.detach().clone() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(int(seed))
    noise = {
        n: torch.randn(p.shape, generator=generator) * p.square().mean().sqrt()
        for n, p in whole.items()
        if p.dim() > 1
    }

    @torch.no_grad()
    def score(scale: float) -> float:
        start = time.perf_counter()
        for n, p in model.named_parameters():
            p.copy_(whole[n] + scale * noise[n] if n in noise else whole[n])
        copy = model.to(device, dtype)
        torch.manual_seed(0)
        total, lengths = 0.0, [len(p.tokens) for p in held_out]
        width = max(lengths)
        pad = tokenizer.pad_token_id or 0
        for at in range(0, len(held_out), 512):
            part = held_out[at : at + 512]
            ids = torch.tensor([[pad] * (width - len(p.tokens)) + p.tokens.tolist() for p in part])
            mask = torch.tensor([[0] * (width - len(p.tokens)) + [1] * len(p.tokens) for p in part])
            drawn = copy.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=config.rollout.max_response_length,
                pad_token_id=pad,
            )[:, width:]
            texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
            for prompt, text in zip(part, texts, strict=True):
                given = prompt.data_source, text, prompt.ground_truth, prompt.extra_info
                result = default(*given)
                total += result["score"] if isinstance(result, dict) else result
        model.to("cpu", torch.float32)
        found = total / len(held_out)
        sample = random.Random(0).sample(texts, 2)
        seconds = round(time.perf_counter() - start, 1)
        print(
            json.dumps({"scale": scale, "score": found, "s": seconds, "texts": sample}), flush=True
        )
        return found

    goal = float(share) * score(0.0)
    low, high = 0.0, 1.0
    for _ in range(TRIES):
        middle = (low + high) / 2
        low, high = (middle, high) if score(middle) > goal else (low, middle)
    score(high)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(whole[n] + high * noise[n] if n in noise else whole[n])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
