"""Small sequence classifiers in folders, with tokenizers of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2Config,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from millrace.data.tokenizer import make_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :,.?\n"


def random_classifier(folder: Path, labels: int = 1, *, template: bool = True) -> Path:
    """Write a classifier of two layers with random weights. Names its labels l0, l1, ..."""
    torch.manual_seed(5)
    tokenizer = _tokenizer(template)
    names = {i: f"l{i}" for i in range(labels)}
    config = _config(tokenizer, 2, num_labels=labels, id2label=names)
    return _save(folder, Qwen2ForSequenceClassification(config), tokenizer)


def last_character(folder: Path, favourite: str) -> Path:
    """Write a classifier whose score is 1 if the text ends with `favourite`, else 0.

    It has no layers: the score reads the normalised one-hot embedding of the last token.
    """
    tokenizer = _tokenizer(template=False)
    config = _config(tokenizer, 0, num_labels=1)
    model: Any = Qwen2ForSequenceClassification(config)
    width = config.hidden_size
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), width))
        model.score.weight.zero_()
        model.score.weight[0, tokenizer.convert_tokens_to_ids(favourite)] = width**-0.5
    return _save(folder, model, tokenizer)


def roberta(folder: Path, positions: int) -> Path:
    """Write a RoBERTa classifier. Its positions start after the padding index."""
    tokenizer = _tokenizer(template=False)
    labels: Any = {"num_labels": 1}
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=positions,
        pad_token_id=tokenizer.pad_token_id,
        **labels,
    )
    return _save(folder, RobertaForSequenceClassification(config), tokenizer)


def _tokenizer(template: bool) -> Any:
    tokenizer = make_tokenizer("chars", [LETTERS], 0)
    if not template:
        tokenizer.chat_template = None
    return tokenizer


def _config(tokenizer: Any, layers: int, **labels: Any) -> Any:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        **labels,
    )


def _save(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
