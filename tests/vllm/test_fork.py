"""The process from which vLLM's core is forked."""

import pytest

from millrace.serving.vllm.fork import context


def test_a_build_for_cpus_forks_no_core_whatever_the_variable_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert context() is None
