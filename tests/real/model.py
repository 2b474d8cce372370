"""The real model's folder, and what transformers alone computes with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.config.packaged import model_folder
from millrace.types import Segment, Tokens, tokens_of

KEY = "MILLRACE_SMOLLM2"
EXACT = 1e-4
"""How far log-probs in float32 may be from those of transformers."""
QUESTIONS = (
    "What is 7 times 8?",
    "Name the capital of France.",
    "Write one short sentence about the sea.",
    "Count from 1 to 9.",
    "What colour is a ripe lemon? Answer with one word.",
    "Say hello in Spanish.",
)
"""The greedy answer to each has a clear best token everywhere: `Reference.margin`."""
LONGEST = 24
"""Tokens of a greedy answer. Some end earlier."""


def weights() -> tuple[Path, str]:
    """Return the folder of the weights, and the command that gets them."""
    if named := os.environ.get(KEY):
        return Path(named), f"{KEY}=FOLDER, of SmolLM2-135M-Instruct"
    return model_folder("smollm2"), "millrace get-model smollm2"


class Reference:
    """The model as transformers loads it, in float32. Only transformers computes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, question: str, system: str = "") -> Tokens:
        head = [{"role": "system", "content": system}] if system else []
        ids = self.tokenizer.apply_chat_template(
            [*head, {"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=True,
        )
        return tokens_of(ids["input_ids"])

    @cached_property
    def prompts(self) -> list[Tokens]:
        return [self.prompt(question) for question in QUESTIONS]

    @cached_property
    def answers(self) -> list[Tokens]:
        """The greedy answers of transformers' own `generate`, with the end token."""
        return [self.greedy(prompt) for prompt in self.prompts]

    @torch.inference_mode()
    def greedy(self, prompt: Tokens, **settings: Any) -> Tokens:
        ids = torch.tensor([list(prompt)])
        drawn = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=LONGEST,
            **settings,
        )
        return tokens_of(drawn[0, len(prompt) :].tolist())

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    @torch.inference_mode()
    def distribution(self, context: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        """Return log p [response, vocabulary] before each token of the response, at temperature 1."""
        logits = self.model(torch.tensor([[*context, *response]]), use_cache=False).logits[0]
        return logits[len(context) - 1 : -1].log_softmax(-1)

    def log_probs(
        self, context: Sequence[int], response: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Return log p(token) [response], from one forward pass of the whole sequence."""
        log_p = (self.distribution(context, response) / temperature).log_softmax(-1)
        return log_p.gather(1, torch.tensor(list(response))[:, None])[:, 0]

    def error(self, context: Sequence[int], segment: Segment, temperature: float = 1.0) -> float:
        """Return the largest distance of a segment's log-probs from transformers'."""
        exact = self.log_probs(context, segment.tokens, temperature)
        return float((exact - torch.tensor(segment.log_probs)).abs().max())


def moved(reference: Reference, seed: int = 0) -> Reference:
    """Return the reference with every tensor moved by a hundredth of its size."""
    other = Reference(reference.folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in other.model.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.add_(noise, alpha=0.01 * float(tensor.square().mean().sqrt()))
    return other
