"""Rewards for the form of a response. They need no ground truth."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any


def format_reward(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    pattern: str,
) -> float:
    """Return 1 if the whole response matches the regular expression, else 0.

    This is the format reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2) with a pattern of the
    user's. Open-R1's matches the start of the response and may end at any line.
    """
    return float(re.fullmatch(pattern, solution_str, re.DOTALL) is not None)


def repetition_penalty(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    ngram_size: int,
    max_penalty: float,
) -> float:
    """Return max_penalty * (1 - distinct n-grams / n-grams), from max_penalty to 0.

    An n-gram is `ngram_size` words in a row, in lower case. A response of fewer words scores 0. The
    formula is Open-R1's `repetition_penalty` (src/open_r1/rewards.py). It gives the response one
    number. In its origin, Yeo et al. 2025 (arXiv 2502.03373, appendix C.2), each token of a
    repeated n-gram has a penalty of its own.
    """
    words = solution_str.lower().split()
    total = len(words) - ngram_size + 1
    if total < 1:
        return 0.0
    ngrams = set(zip(*(islice(words, at, None) for at in range(ngram_size)), strict=False))
    return max_penalty * (1 - len(ngrams) / total)
