"""The imports of vLLM's core, for the process from which it is forked: `millrace.serving.vllm.fork`."""

import importlib

for name in (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "millrace.sync.adapters",
    "millrace.sync.ipc",
):
    importlib.import_module(name)
