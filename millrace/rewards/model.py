"""The frozen models of workers: a classifier that scores responses, and a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

from millrace.config import RewardModelConfig, TeacherConfig
from millrace.data.chat import Chat
from millrace.data.rows import Problem
from millrace.data.spec import nearest
from millrace.errors import ConfigError, DataError, RewardError, bad_value
from millrace.models.model import DTYPES
from millrace.models.tokenizer import load_tokenizer
from millrace.rewards.wire import Call
from millrace.types import Floats, floats_of


@dataclass(frozen=True)
class RewardModel:
    """A sequence classifier with its own tokenizer. The score of a text is one of its logits."""

    key: str
    config: RewardModelConfig
    chat: Chat
    model: Any
    index: int
    """The label whose logit is the score."""
    pad_id: int
    limit: int
    """Most tokens of a text."""

    @classmethod
    def load(cls, key: str, spec: dict[str, Any]) -> RewardModel:
        """Load the model and its tokenizer onto the device. `key` is the section's name.

        Raise ConfigError if the path has no sequence classifier whose weights are complete, if
        the label is unknown, or if it cannot make batches because it has no padding token.
        """
        config = RewardModelConfig.model_validate(spec)
        # transformers would give a causal model a classifier's head with random weights.
        model = _load_whole(AutoModelForSequenceClassification, key, config, "sequence classifier")
        tokenizer: Any = load_tokenizer(config.path, trust_remote_code=config.trust_remote_code)
        text = model.config.get_text_config()
        pad = text.pad_token_id if text.pad_token_id is not None else tokenizer.pad_token_id
        if pad is None and config.batch_size > 1:
            rule = "the model and its tokenizer have no padding token, so they make no batches"
            raise bad_value(
                f"{key}.batch_size", config.batch_size, rule, f"{key}.batch_size=1, or add one"
            )
        text.pad_token_id = pad
        own = _most_tokens(model, text)
        limit = config.max_length or own or 1 << 20
        if own and limit > own:
            rule = f"the model reads at most {own} tokens"
            raise bad_value(f"{key}.max_length", limit, rule, f"{key}.max_length={own}, or 0")
        chat = Chat(tokenizer, generation_prompt=False)
        return cls(key, config, chat, model, _index(key, config, model), pad or 0, limit)

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    def encode(self, call: Call, completion: str) -> list[int]:
        """Return the tokens of the prompt and the completion through the chat template.

        A prompt that is a string becomes a user's message. Without a chat template, the texts are
        joined. The text of a special token never becomes this token. Raise RewardError if the
        result is too long or empty, or if the template cannot render it.
        """
        messages = call.columns.get("prompt")
        if self.chat.tokenizer.chat_template:
            asked = messages or [{"role": "user", "content": call.prompt}]
            whole = [*asked, {"role": "assistant", "content": completion}]
            try:
                tokens = list(self.chat.render(Problem(whole, call.data_source), "response")[1])
            except DataError as error:
                raise RewardError("special_token", str(error)) from error
        else:
            text = "\n".join(m["content"] for m in messages) if messages else call.prompt
            tokens = self.chat.encode(text + completion)
        if not tokens:
            raise RewardError("empty", "prompt and response are no token of the reward model")
        if len(tokens) > self.limit and self.config.truncation == "error":
            raise RewardError(
                "too_long",
                f"prompt and response have {len(tokens)} tokens, and {self.key}.max_length is "
                f"{self.limit}; {self.key}.truncation=left would keep the end",
            )
        left = self.config.truncation == "left"
        return tokens[-self.limit :] if left else tokens[: self.limit]

    @torch.inference_mode()
    def score(self, batch: Sequence[list[int]]) -> list[float]:
        """Return the scores of texts as tokens.

        Raise RewardError if the device has too little memory for the batch.
        """
        with _fitting("texts", batch, self.key):
            logits = _forward(self.model, batch, self.pad_id).float()
        if self.config.function_to_apply == "sigmoid":
            logits = logits.sigmoid()
        elif self.config.function_to_apply == "softmax":
            logits = logits.softmax(-1)
        return [float(value) for value in logits[:, self.index].cpu()]


@dataclass(frozen=True)
class TeacherModel:
    """A teacher in a worker process: a frozen causal language model."""

    key: str
    model: Any
    batch_size: int
    temperature: float

    @classmethod
    def load(cls, key: str, spec: dict[str, Any]) -> TeacherModel:
        """Load the model onto the device. `key` is the section's name.

        Raise ConfigError if the path has no causal language model whose weights are complete.
        """
        temperature = spec.pop("temperature")
        config = TeacherConfig.model_validate(spec)
        model = _load_whole(AutoModelForCausalLM, key, config, "causal language model")
        return cls(key, model, config.batch_size, temperature)

    def encode(self, call: Call, completion: str) -> list[int]:
        return call.completion_ids[0]

    @torch.inference_mode()
    def score(self, batch: Sequence[list[int]]) -> list[Floats]:
        """Return log p of each token after those before it, and 0 for the first one.

        Raise RewardError if the device has too little memory for the batch.
        """
        with _fitting("threads", batch, self.key):
            logits = _forward(self.model, batch, 0)
            return [self._of(logits[i], tokens) for i, tokens in enumerate(batch)]

    def _of(self, logits: torch.Tensor, tokens: list[int]) -> Floats:
        at = torch.tensor(tokens[1:], device=logits.device).unsqueeze(-1)
        log_probs = (logits[: len(at)].float() / self.temperature).log_softmax(-1)
        return floats_of([0.0, *log_probs.gather(-1, at)[:, 0].tolist()])


def _load_whole(auto: Any, key: str, config: RewardModelConfig | TeacherConfig, kind: str) -> Any:
    """Return the model of a class of transformers, with all its weights, on its device.

    Raise ConfigError if it has not all of them.
    """

    def refusal(rule: str) -> ConfigError:
        fix = f"the folder or hub id of a Hugging Face {kind}"
        return bad_value(f"{key}.path", config.path, rule, fix)

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the driver shows the progress
    try:
        model, loading = auto.from_pretrained(
            config.path,
            dtype=DTYPES[config.dtype],
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError) as error:
        where = f" (from {Path.cwd()})" if not Path(config.path).exists() else ""
        rule = f"no {kind} can be loaded from it{where}: {str(error).splitlines()[0]}"
        raise refusal(rule) from error
    if missing := sorted(loading["missing_keys"]):
        rule = f"it has no weights for {', '.join(missing[:3])}, so their values would be random"
        raise refusal(rule)
    # The driver gives a worker one GPU, or tells it to use the CPU.
    return model.to("cuda" if config.device == "cuda" else "cpu").eval()


def _forward(model: Any, batch: Sequence[list[int]], pad_id: int) -> torch.Tensor:
    """Return the logits of texts as tokens. They are padded on the right, which none reads."""
    texts = [torch.tensor(tokens) for tokens in batch]
    ids = pad_sequence(texts, batch_first=True, padding_value=pad_id)
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    logits: torch.Tensor = model(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device)
    ).logits
    return logits


@contextmanager
def _fitting(kind: str, batch: Sequence[list[int]], key: str) -> Iterator[None]:
    """Turn the error of a full device into a RewardError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        size = f"{len(batch)} {kind} of {max(map(len, batch))} tokens do not fit"
        raise RewardError("out_of_memory", f"{size}: a smaller {key}.batch_size") from error


def _most_tokens(model: Any, text: Any) -> int:
    """Return the most tokens that the model reads, or 0 if it sets no limit.

    RoBERTa's models number positions from their padding index + 1, so the first ones are unused.
    """
    own = int(getattr(text, "max_position_embeddings", 0) or 0)
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
            own = min(own, table.num_embeddings) - table.padding_idx - 1
    return own


def _index(key: str, config: RewardModelConfig, model: Any) -> int:
    """Return the index of the label, which may be empty if the model has just one."""
    labels = {str(name): int(i) for i, name in model.config.id2label.items()}
    if config.label and config.label not in labels:
        rule = f"the model has the labels {', '.join(labels)}"
        raise bad_value(f"{key}.label", config.label, rule, nearest(config.label, labels))
    if not config.label and len(labels) > 1:
        rule = f"the model has {len(labels)} labels, and one of them is the score"
        raise bad_value(f"{key}.label", "", rule, f"one of {', '.join(labels)}")
    if config.function_to_apply == "softmax" and len(labels) == 1:
        rule = "with one label the result is always 1"
        fix = f"{key}.function_to_apply=sigmoid or none"
        raise bad_value(f"{key}.function_to_apply", "softmax", rule, fix)
    return labels[config.label] if config.label else 0
