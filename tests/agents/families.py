"""Chat templates of public model families, and a byte-level tokenizer for each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from millrace.agents.template import Bridge
from millrace.data.tokenizer import make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "templates"
CHATML = ("<|im_start|>", "<|im_end|>")
QWEN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@dataclass(frozen=True)
class Family:
    """The marks of one family, and what its template is known to support."""

    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    added: tuple[str, ...] = ()
    """Tokens that are not special, but that no text of a tool may become."""
    ends: tuple[str, ...] = ()
    """Other tokens that end an answer."""
    system: bool = True
    tools: bool = False
    results: bool = False
    parallel: bool = False
    thinking: Literal["none", "kept", "dropped"] = "none"
    user: Bridge = "exact"
    tool: Bridge = "none"


DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"),
        *(f"tool▁{what}▁{end}" for what in ("calls", "call", "outputs", "output")
          for end in ("begin", "end")),
    )
)  # fmt: skip
ALL_TOOLS: dict[str, Any] = {"tools": True, "results": True, "parallel": True, "tool": "exact"}

FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, "<|im_end|>", results=True, tool="exact"),
    "smollm2": Family(CHATML, "<|im_end|>", results=True, tool="exact"),
    "qwen2.5": Family(CHATML, "<|im_end|>", added=QWEN, **ALL_TOOLS),
    "qwen3": Family(
        CHATML, "<|im_end|>", added=QWEN, thinking="dropped", user="short",
        **(ALL_TOOLS | {"tool": "short"}),
    ),
    "qwen3-thinking": Family(
        CHATML, "<|im_end|>", added=QWEN, thinking="dropped", user="short",
        **(ALL_TOOLS | {"tool": "short"}),
    ),
    "qwen3-coder": Family(CHATML, "<|im_end|>", added=QWEN, **ALL_TOOLS),
    "llama2": Family(("<s>", "</s>"), "</s>", "<s>"),
    "llama3": Family(LLAMA3, "<|eot_id|>", LLAMA3[0], results=True, tool="exact"),
    "llama3.1": Family(
        (*LLAMA3, "<|eom_id|>", "<|python_tag|>"), "<|eot_id|>", LLAMA3[0],
        tools=True, results=True, tool="exact",
    ),
    "mistral-v1": Family(("<s>", "</s>"), "</s>", "<s>", system=False),
    "mistral-v0.3": Family(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
         "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>", "<s>", **ALL_TOOLS,
    ),
    "gemma": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<bos>",
        ends=("<eos>",), system=False,
    ),
    "phi3": Family(
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|endoftext|>",
        ends=("<|end|>",),
    ),
    "phi4": Family((*CHATML, "<|im_sep|>", "<|endoftext|>"), "<|im_end|>", ends=("<|endoftext|>",)),
    "deepseek-r1": Family(
        DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", added=("<think>", "</think>"),
        results=True, parallel=True, thinking="dropped", tool="exact",
    ),
    "harmony": Family(
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        "<|return|>", ends=("<|call|>",), tools=True, results=True, tool="exact",
    ),
    "zephyr": Family(("<s>", "</s>"), "</s>", "<s>"),
    "granite": Family(
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
        "<|end_of_text|>", **ALL_TOOLS,
    ),
    "command-r": Family(
        ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>",
         "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>",
    ),
    "glm4": Family(
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
         "<|endoftext|>"),
        "<|endoftext|>", ends=("<|user|>", "<|observation|>"), **ALL_TOOLS,
    ),
    "vicuna": Family(("<s>", "</s>"), "</s>", "<s>"),
}  # fmt: skip
"""Every template of the folder. It is written by hand in the structure of the public one."""

TEXTS = ["the weather in Paris is hello world, a lookup of the table says 12 degrees\n"] * 4


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the marks and the template of a family."""
    family = FAMILIES[name]
    tokenizer = make_tokenizer("bpe", TEXTS, 320)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    tokenizer.add_tokens(list(family.added))
    tokenizer.eos_token = family.eos
    tokenizer.bos_token = family.bos
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return tokenizer


def end_ids(name: str) -> list[int]:
    """Return the tokens that end an answer."""
    family = FAMILIES[name]
    ids = tokenizer_of(name).convert_tokens_to_ids([family.eos, *family.ends])
    return [int(i) for i in ids]
