"""The names of SGLang that millrace calls or replaces, in each release that it accepts.

The installed release is imported by the other tests. The later one needs another torch, so its source
is read alone. `make test-sglang` needs an index of packages for that, and skips the test without one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import sglang

from millrace.config.serving_checks import SGLANG_RELEASES

NAMES: dict[str, dict[str, list[str]]] = {
    "srt/managers/scheduler.py": {
        "Scheduler.handle_rpc_request": ["self", "recv_req"],
        "Scheduler.handle_generate_request": ["self", "recv_req"],
        "Scheduler.process_batch_result": ["self", "batch", "result"],
        "Scheduler.process_pending_chunked_abort": ["self"],
        "Scheduler.pause_generation": ["self", "recv_req"],
        "Scheduler.is_fully_idle": ["self"],
        "run_scheduler_process": ["server_args", "port_args"],
    },
    "srt/managers/schedule_batch.py": {
        "release_req": [],
    },
    "srt/managers/scheduler_components/batch_result_processor.py": {
        "SchedulerBatchResultProcessor._maybe_collect_routed_experts": ["self", "req"],
    },
    "srt/model_executor/model_runner.py": {
        "ModelRunner.load_model": ["self"],
    },
    "srt/layers/vocab_parallel_embedding.py": {
        "ParallelLMHead.tie_weights": ["self", "embed_tokens"],
    },
    "srt/state_capturer/base.py": {
        "BaseHostCache.__init__": ["self", "num_tokens", "num_layers", "topk_size"],
        "BaseTopkCapturer.get_topk": [
            *("self", "req_pool_idx", "seqlen", "req_to_token_pool", "start_len"),
        ],
    },
    "srt/state_capturer/routed_experts.py": {
        "RoutedExpertsCapturer._get_local_slice": ["self"],
        "get_global_experts_capturer": [],
    },
    "srt/managers/load_snapshot.py": {
        "create_load_snapshot_writer": [],
    },
    "srt/managers/tokenizer_manager.py": {
        "TokenizerManager._send_one_request": ["self"],
        "TokenizerManager.abort_request": ["self", "rid"],
        "TokenizerManager.generate_request": ["self", "obj", "request"],
        "TokenizerManager.auto_create_handle_loop": ["self"],
    },
    "srt/entrypoints/engine.py": {
        "init_tokenizer_manager": ["server_args", "port_args", "TokenizerManagerClass"],
        "Engine._launch_detokenizer_subprocesses": ["cls"],
        "Engine.get_all_child_pids": ["self"],
    },
    "srt/sampling/sampling_batch_info.py": {
        "SamplingBatchInfo.from_schedule_batch": ["cls", "batch", "vocab_size"],
    },
    "srt/layers/sampler.py": {
        "sampling_from_probs_torch": ["probs", "sampling_seed", "positions"],
        "top_k_top_p_min_p_sampling_from_probs_torch": [
            *("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling"),
            *("sampling_seed", "positions"),
        ],
    },
}
"""Functions by file, and the first of their arguments."""
ATTRIBUTES = {
    "srt/managers/scheduler.py": {
        *("_engine_paused", "waiting_queue", "running_batch", "last_batch", "chunked_req"),
        *("result_queue", "forward_stream", "tp_worker", "tp_group", "_pending_chunked_abort_req"),
    },
    "srt/managers/schedule_batch.py": {
        *("inflight_middle_chunks", "is_retracted", "output_ids", "extra_key", "req_pool_idx"),
        *("return_routed_experts", "routed_experts_start_len", "output_ids_through_stop"),
    },
}


@pytest.fixture(params=SGLANG_RELEASES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a release's source."""
    if request.param == version("sglang"):
        return Path(str(sglang.__file__)).parent
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
         "--python-version", "3.12", "--platform", "manylinux_2_34_x86_64", "-d", tmp_path,
         f"sglang=={request.param}"],
        capture_output=True,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("no index of packages has the release")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path, [n for n in wheel.namelist() if n.startswith("sglang/srt/")])
    return tmp_path / "sglang"


def test_a_release_has_the_names_that_millrace_needs(source: Path) -> None:
    for file, functions in NAMES.items():
        tree = ast.parse((source / file).read_text())
        found = {}
        for node in tree.body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for each in inner:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[prefix + each.name] = [a.arg for a in each.args.args]
        for name, arguments in functions.items():
            assert found[name][: len(arguments)] == arguments, f"{file}: {name}"
    for file, names in ATTRIBUTES.items():
        tree = ast.parse((source / file).read_text())
        known = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        known |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in n.args}
        assert names <= known, f"{file}: {names - known}"
