"""Does it parse: shell by bash's own grammar, Python by its own; nothing is run, and equal code is asked once."""

import re
from functools import lru_cache

from hivetune.checkers.code import python_parses, shell_parses

_CACHED = 4096
# Words without any character that means something to the shell. Starting bash takes 10 ms, and most lines are so.
_PLAIN_LINE = re.compile(r"[A-Za-z_./][\w./-]*(?: [\w./:=@%+,-]+)*")
_RESERVED = frozenset(
    [
        "if",
        "then",
        "elif",
        "else",
        "fi",
        "for",
        "while",
        "until",
        "do",
        "done",
        "case",
        "esac",
        "select",
        "function",
        "time",
        "coproc",
        "in",
    ]
)


@lru_cache(_CACHED)
def parses(code: str, language: str) -> bool:
    """`language`: sh or python. Raises MachineNotFit without bash."""
    if language == "sh" and all(is_plain_command(line) for line in code.splitlines()):
        return bool(code.strip())
    fenced = f"```{'bash' if language == 'sh' else language}\n{code}\n```"
    return shell_parses(fenced, {}) if language == "sh" else python_parses(fenced, {})


def is_plain_command(line: str) -> bool:
    """A simple command by bash's grammar, whatever its words mean: no quote, no operator, no reserved word in front."""
    return _PLAIN_LINE.fullmatch(line) is not None and line.split(" ", 1)[0] not in _RESERVED
