"""The imports that ranks share: their fork server imports this module once, before any fork.

Nothing that was imported is ever garbage. Without `freeze`, every rank would look through it, and
copy its pages.
"""

import gc
from contextlib import suppress
from importlib import import_module

gc.disable()
for name in ("fsdp.lora_cases", "invariance_cases", "test_state_writer", "megatron.weight_cases"):
    with suppress(ImportError):  # the rank that needs it raises the error again
        import_module(f"tests.train.{name}")
gc.freeze()
gc.enable()
