"""vLLM for real: its CPU build, in an environment of its own (`make test-vllm`). Elsewhere these tests are not collected."""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("vllm") is None else []
