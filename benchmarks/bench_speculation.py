"""Draw with vLLM alone, with and without n-grams, and compare the log-probs of what it draws.

python benchmarks/bench_speculation.py MODEL_FOLDER {on,off} {raw_logprobs,processed_logprobs}
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import vllm

PROMPT = [5, 6, 7, 8] * 10
"""Text that repeats, so n-grams have drafts."""
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def main(folder: str, speculation: str, mode: str) -> None:
    more: dict[str, Any] = {"speculative_config": NGRAM} if speculation == "on" else {}
    engine = vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        logprobs_mode=mode,
        **more,
    )
    params = [
        vllm.SamplingParams(max_tokens=150, logprobs=0, seed=k, ignore_eos=True, detokenize=False)
        for k in range(16)
    ]
    drawn = engine.generate([{"prompt_token_ids": PROMPT}] * len(params), params)
    found = [next(iter(d.values())).logprob for o in drawn for d in o.outputs[0].logprobs]
    finite = [x for x in found if not math.isnan(x)]
    result = {
        "speculation": speculation,
        "mode": mode,
        "tokens": len(found),
        "nan": len(found) - len(finite),
        "mean_log_prob": round(sum(finite) / len(finite), 3),
        "below_minus_10": sum(x < -10 for x in finite),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:4])
