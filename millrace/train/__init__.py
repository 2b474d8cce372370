"""The parts that all train engines share.

`millrace.train` is this package and the function of the Python API, whichever is imported first. So
the package can be called: it calls that function.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("millrace.api").train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
