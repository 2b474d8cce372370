"""Models: their config.json, and weights from a folder, the hub or a seed.

Rollout and train engines load models with the same functions. They therefore start from the same
bits without a transfer of weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from millrace.config import ModelConfig
from millrace.errors import bad_value
from millrace.models.checks import has_weights
from millrace.models.mixtures import experts_of
from millrace.models.shape import keys_of_shape
from millrace.models.shape import write_shape as write_shape
from millrace.models.tokenizer import load_tokenizer

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shape_config(model: ModelConfig, folder: str = "") -> Any:
    """Return config.json of the model in `folder`, or of the one that the section describes.

    The vocabulary of a new model without model.shape.vocab_size has one token.
    """
    if source := folder or model.path:
        hf = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
        if not folder:
            hf.update(model.override_config)
        return hf.get_text_config()
    vocab_size = model.shape.vocab_size or 1
    return AutoConfig.for_model(**keys_of_shape(model.shape), vocab_size=vocab_size)


def load_model(
    folder: str | Path,
    *,
    seed: int,
    dtype: Literal["float32", "bfloat16"],
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """Load the causal model in `folder` (or of a hub id), in eval mode.

    A folder without weights gives random weights from the seed. They are drawn in float32 and then
    cast, so every dtype starts from the same numbers. They are drawn on a GPU if they take at most
    half of its free memory, else on the CPU.
    """
    path = Path(folder)
    model: Any  # transformers' stubs know neither eval() nor to()
    if not path.is_dir() or has_weights(path):
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=DTYPES[dtype],
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    elif (path / "config.json").is_file():
        model = _random_model(
            path, seed, torch.device(device), attn_implementation, trust_remote_code
        )
    else:
        raise bad_value(
            "model.path",
            str(folder),
            "the folder has neither weights nor a config.json",
            "a folder of a Hugging Face causal model",
        )
    for parameter in model.parameters():
        # model.to(dtype) would also round the rotary embedding's float32 buffers.
        parameter.data = parameter.data.to(device=device, dtype=DTYPES[dtype])
    return cast(PreTrainedModel, model.to(device).eval())


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids that end a response: from the generation config, else from the model config.

    The result is empty if neither config has such an id.
    """
    return _first_eos(model.generation_config, model.config)


def folder_eos_ids(folder: str | Path, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Return the ids that end a response of the model in `folder` (or of a hub id).

    They are those of `eos_ids`, and the tokenizer's own one, which a fine-tuned chat model may have
    changed alone. No weights are loaded.
    """
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(str(folder))
    except OSError:  # the folder has none
        generation = None
    ids = _first_eos(generation, config)
    if Path(folder).is_dir() and not (Path(folder) / "tokenizer_config.json").is_file():
        return ids  # Without the file, transformers makes a tokenizer with ids of its own.
    own = load_tokenizer(folder, trust_remote_code=trust_remote_code).eos_token_id
    return ids if own is None or own in ids else (*ids, int(own))


def _first_eos(*sources: Any) -> tuple[int, ...]:
    for source in sources:
        ids = source.eos_token_id if source is not None else None
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def empty_model(source: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build the float32 model in a folder, of a hub id or of a config.json on the meta device.

    Its parameters have names and shapes, but use no memory.
    """
    with torch.device("meta"):
        return _from_config(source, "sdpa", trust_remote_code).eval()


def unfilled_model(
    folder: str | Path, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the model in `folder` (or of a hub id), with its own attention and undrawn weights."""
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    with torch.device(device), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    if dtype == torch.float64 and experts_of(config.get_text_config()):
        model.set_experts_implementation("eager")  # a grouped GEMM has no float64
    return cast(PreTrainedModel, model.eval())


def _from_config(source: Any, attn_implementation: str, trust_remote_code: bool) -> PreTrainedModel:
    config = source
    if isinstance(source, str | Path):
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config,
        dtype=torch.float32,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    return model


def _random_model(
    path: Path, seed: int, device: torch.device, attn_implementation: str, trust_remote_code: bool
) -> PreTrainedModel:
    on_gpu = fits(path, device, trust_remote_code=trust_remote_code)
    with (
        torch.random.fork_rng(devices=[device] if on_gpu else []),
        torch.device(device if on_gpu else "cpu"),
    ):
        torch.manual_seed(seed)
        model = _from_config(path, attn_implementation, trust_remote_code)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(path))
    return model


def fits(folder: str | Path, device: torch.device, *, trust_remote_code: bool = False) -> bool:
    """Return whether the float32 model takes at most half of the GPU's free memory.

    The result is false on a CPU.
    """
    if device.type == "cpu":
        return False
    model = empty_model(folder, trust_remote_code=trust_remote_code)
    return sum(4 * p.numel() for p in model.parameters()) * 2 <= torch.cuda.mem_get_info(device)[0]
