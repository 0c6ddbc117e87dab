"""Hivetune: train a better local model from interactions that you already have. docs/python.md shows how.

The stations of the walk are imported when they are first used, so that `import hivetune` takes no time.
"""

import importlib
import sys
import types
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "check",
    "configure",
    "evaluate",
    "export",
    "gate",
    "open_trained",
    "plan",
    "prepare",
    "register",
    "serve",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hivetune' has no attribute {name!r}")
    globals()[name] = found = vars(importlib.import_module("hivetune.walk"))[name]
    return found


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))


class _Package(types.ModuleType):
    """This package. An import of the folder `train` or `serve` does not take the place of the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


types.ModuleType.__setattr__(sys.modules[__name__], "__class__", _Package)
