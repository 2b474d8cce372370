"""vLLM for real: its CPU build, in an environment of its own (`make test-vllm`).

Other environments do not collect these tests.
"""

from __future__ import annotations

from tests.serving.engine import ENGINE

collect_ignore_glob = ["test_*.py"] if ENGINE != "vllm" else []
