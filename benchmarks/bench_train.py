"""Measure training with several settings, and print estimated beside measured memory.

    python benchmarks/bench_train.py memory     one GPU: both engines, two sizes; under 3 minutes
    python benchmarks/bench_train.py long       rows of 32K tokens, 1.5B; two GPUs or one
    python benchmarks/bench_train.py shapes     two GPUs: both engines, 1.5B and a mixture

Every arm is one `millrace bench train`. It prints a table, and --json appends raw figures. An arm
that needs more GPUs than there are is left out, and the table names it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FULL = ("model.gradient_checkpointing=true", "model.gradient_checkpointing_share=1.0")
"""Every layer recomputes its activations."""
EAGER = ("model.compile=false",)
MEGATRON = (*EAGER, "model.gradient_checkpointing_share=1.0", "trainer.engine=megatron")
HALF_B = (
    "model.shape.hidden_size=896",
    "model.shape.num_hidden_layers=24",
    "model.shape.num_attention_heads=14",
    "model.shape.intermediate_size=4864",
)
"""The shape of Qwen2.5-0.5B."""
TINY = (
    *("model.shape.hidden_size=64", "model.shape.num_hidden_layers=2"),
    *("model.shape.num_attention_heads=4", "model.shape.intermediate_size=128"),
    *("model.shape.vocab_size=64", "model.dtype=float32", "model.compile=false"),
    *("rollout.engine=torch", "trainer.threads=1"),
)
"""A shape for the test of this file on a CPU, where Megatron needs the shim of the tests:

PYTHONPATH=tests/train/megatron/site:. python benchmarks/bench_train.py shapes --tiny --gpus 2 --length 32
"""
TWO = ("trainer.n_gpus_per_node=2",)


MIXTURE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024,
}
"""A Qwen3-MoE of 1.85 billion parameters. A token uses 0.64 billion."""
DENSE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
}
"""The shape of Qwen2.5-1.5B."""
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tokens(count: int) -> str:
    return f"actor.ppo_max_token_len_per_gpu={count}"


# name, GPUs, tokens of a document, overrides
Arm = tuple[str, int, int, tuple[str, ...]]


def memory_arms() -> list[Arm]:
    return [
        ("fsdp 0.5B 16K", 1, 4096, (*HALF_B, *EAGER, tokens(16384))),
        ("fsdp 1.5B 8K", 1, 4096, (*EAGER, tokens(8192))),
        ("fsdp 1.5B 32K recompute", 1, 4096, (*EAGER, *FULL, tokens(32768))),
        ("megatron 0.5B 16K", 1, 4096, (*HALF_B, *MEGATRON, tokens(16384))),
        ("megatron 1.5B 8K", 1, 4096, (*MEGATRON, tokens(8192))),
        ("megatron 1.5B 32K recompute", 1, 4096, (*EAGER, *FULL, MEGATRON[-1], tokens(32768))),
    ]


def long_arms(length: int) -> list[Arm]:
    """Rows of `length` tokens: on one GPU with recomputation, and on two that share them."""
    half = tokens(-(-length // 2))
    shared = "actor.ulysses_sequence_parallel_size=2"
    context = "trainer.megatron.context_parallel_size=2"
    return [
        ("fsdp, 1 GPU, recompute", 1, length, (*FULL, tokens(length))),
        ("fsdp, 1 GPU", 1, length, (tokens(length),)),
        ("megatron, 1 GPU, recompute", 1, length, (*EAGER, *FULL, MEGATRON[-1], tokens(length))),
        ("fsdp, 2 GPUs share tokens", 2, length, (half, shared, *TWO)),
        ("fsdp, 2 GPUs share tokens, recompute", 2, length, (*FULL, half, shared, *TWO)),
        ("megatron, 2 GPUs share tokens", 2, length, (*MEGATRON, half, context, *TWO)),
        (
            "megatron, 2 GPUs share tokens, recompute",
            2,
            length,
            (*MEGATRON, *FULL, half, context, *TWO),
        ),
    ]


def shapes_arms(folder: Path, length: int) -> list[Arm]:
    """Both engines on two GPUs, all with the same weights and as many tokens in each step."""

    def megatron(model: str, share: int, *keys: str) -> tuple[str, ...]:
        sizes = (f"trainer.megatron.{key}" for key in keys)
        return (f"model.path={folder / model}", *MEGATRON, *TWO, tokens(share), *sizes)

    def fsdp(model: str) -> tuple[str, ...]:
        return (f"model.path={folder / model}", *EAGER, *TWO, tokens(each))

    each = 4 * length
    overlaps = ("overlap_grad_reduce=true", "overlap_param_gather=true")
    tensor = ("tensor_model_parallel_size=2", "sequence_parallel=true")
    dense, mixture = "dense", "mixture"
    return [
        ("1.5B fsdp", 2, length, fsdp(dense)),
        ("1.5B megatron DP2", 2, length, megatron(dense, each, *overlaps)),
        ("1.5B megatron TP2", 2, length, megatron(dense, 2 * each, *tensor)),
        ("1.5B megatron PP2", 2, length, megatron(dense, each, "pipeline_model_parallel_size=2")),
        ("mixture fsdp", 2, length, fsdp(mixture)),
        (
            "mixture megatron EP2",
            2,
            length,
            megatron(mixture, each, "expert_model_parallel_size=2"),
        ),
        ("mixture megatron DP2", 2, length, megatron(mixture, each, *overlaps)),
    ]


def write_models(folder: Path, tiny: bool) -> None:
    """Write both models of `shapes` with random weights, drawn on a GPU if there is one."""
    import torch
    from transformers import Qwen2Config, Qwen3MoeConfig

    from millrace.data.tokenizer import make_tokenizer
    from millrace.models.model import load_model

    device = "cuda" if torch.cuda.is_available() and not tiny else "cpu"
    experts = {"head_dim": 16, "moe_intermediate_size": 32} if tiny else {}
    configs: dict[str, Any] = {
        "dense": Qwen2Config(
            **DENSE | (SMALL | {"intermediate_size": 128} if tiny else {}),
            tie_word_embeddings=True,
            architectures=["Qwen2ForCausalLM"],
        ),
        "mixture": Qwen3MoeConfig(
            **MIXTURE | (SMALL | experts if tiny else {}),
            norm_topk_prob=True,
            tie_word_embeddings=True,
            architectures=["Qwen3MoeForCausalLM"],
        ),
    }
    for name, config in configs.items():
        config.save_pretrained(folder / name)
        make_tokenizer("chars", ["0123456789>"], 0).save_pretrained(folder / name)
        model = load_model(folder / name, seed=0, dtype="bfloat16", device=device)
        model.save_pretrained(folder / name)


def measure(arm: Arm, steps: int, extra: tuple[str, ...]) -> dict[str, Any]:
    """Run an arm, and return its figures, or the last line of its error."""
    name, _, length, overrides = arm
    # Nothing is drawn. Short rows of a test must fit too.
    lengths = (
        *("rollout.max_prompt_length=8", "rollout.max_response_length=16"),
        "rollout.drawn_lengths.median=8",
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "millrace", "bench", "train", "shapes/qwen2_1.5b", "--json"),
            *("--steps", str(steps), "--length", str(length), *lengths, *overrides, *extra),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode:
        return {"arm": name, "error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"arm": name, **found}


def line(found: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "error" in found:
        return f"| {found['arm']} | {found['error']} | | | | | |"
    estimated, peak = found["estimated_memory_gib"], found["peak_memory_gib"]
    off = f"{estimated / peak - 1:+.1%}" if peak else ""
    rate = found["tokens_per_s_per_device"] * found["ranks"]
    return (
        f"| {found['arm']} | {found['step_s']:.3f} | {rate:,.0f} | {found['mfu']:.3f} | "
        f"{peak:.1f} | {estimated:.1f} | {off} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=("memory", "long", "shapes"))
    parser.add_argument(
        "--length",
        type=int,
        default=0,
        help="tokens of a row; 0: 32768 of `long`, 4096 of `shapes`",
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=0, help="0 asks torch")
    parser.add_argument("--only", default="", help="arms whose name has this text")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument("--json", default="", help="file that gets one line for each arm")
    options = parser.parse_args()
    if not options.gpus:
        import torch

        options.gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        if options.part == "memory":
            arms = memory_arms()
        elif options.part == "long":
            arms = long_arms(options.length or 32768)
        else:
            write_models(Path(folder), options.tiny)
            arms = shapes_arms(Path(folder), options.length or 4096)
        measure_all(arms, options)


def measure_all(arms: list[Arm], options: argparse.Namespace) -> None:
    """Measure the arms one after the other, and print each row as soon as it is there."""
    print("| arm | step s | tokens/s | MFU | peak GiB | estimated GiB | off |", flush=True)
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    for arm in arms:
        if options.only not in arm[0]:
            continue
        if arm[1] > options.gpus:
            print(f"| {arm[0]} | needs {arm[1]} GPUs | | | | | |", flush=True)
            continue
        found = measure(arm, options.steps, TINY if options.tiny else ())
        print(line(found), flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
