"""Hivetune: train a better local model from interactions that you already have. docs/python.md shows how.

The stations of the walk are imported when they are first used, so that `import hivetune` takes no time.
"""

import importlib
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
    walk = vars(importlib.import_module("hivetune.walk"))
    # All of them at once: `hivetune.train` and `hivetune.serve` are folders too, which the import has just bound.
    globals().update({name_of: walk[name_of] for name_of in __all__})
    return walk[name]


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
