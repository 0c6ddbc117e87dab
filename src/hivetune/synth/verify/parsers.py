"""Does it parse: shell by bash's own grammar, Python by its own; nothing is run, and equal code is asked once."""

from functools import lru_cache

from hivetune.judge.checkers.code import python_parses, shell_parses

_CACHED = 4096


@lru_cache(_CACHED)
def parses(code: str, language: str) -> bool:
    """`language`: sh or python. Raises MachineNotFit without bash."""
    fenced = f"```{'bash' if language == 'sh' else language}\n{code}\n```"
    return shell_parses(fenced, {}) if language == "sh" else python_parses(fenced, {})
