"""The shim in every Python process whose PYTHONPATH has this folder, for runs with workers.

It is installed right before a process imports the Megatron engine. Other processes stay light.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType


class Shimmed(MetaPathFinder):
    """Finds nothing, and installs the shim at the import of the engine."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name == "millrace.run.session":
            from millrace.run import machine

            machine.NVIDIA = Path(os.devnull)  # the run then expects a GPU here
        if name == "millrace.extras.megatron.engine":
            sys.meta_path.remove(self)
            from tests.train.megatron import shim

            shim.install()


sys.meta_path.insert(0, Shimmed())
