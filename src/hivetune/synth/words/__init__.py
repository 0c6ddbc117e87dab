"""Lists of words, one file each: verbs that descriptions begin with, function words, what an answer's frame says."""

from functools import cache
from importlib.resources import files


@cache
def word_list(name: str) -> frozenset[str]:
    """Return the words of NAME.txt."""
    return frozenset((files(__package__) / f"{name}.txt").read_text(encoding="utf-8").split())
