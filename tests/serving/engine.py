"""The serving engine of this environment."""

from __future__ import annotations

import importlib.util

# The environment of SGLang has a stand-in for vLLM.
ENGINE = next((name for name in ("sglang", "vllm") if importlib.util.find_spec(name)), "")
