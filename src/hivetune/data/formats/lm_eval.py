"""Samples of lm-eval with choices: the one that it calls right, after what stands before all of them.

https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/interface.md (`--log_samples`)
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row


def recognise(record: Row) -> bool:
    return _right_choice(record) is not None


def rows(record: Row) -> Iterator[Row]:
    if (choice := _right_choice(record)) is not None:
        yield choice


def _right_choice(record: Row) -> Row | None:
    """Return the choice that lm-eval calls correct, after the text before all choices."""
    args = record.get("arguments")
    calls = list(args.values()) if isinstance(args, dict) else args if isinstance(args, list) else []
    pairs = [tuple(call.values()) if isinstance(call, dict) else tuple(call) for call in calls if call]
    target = str(record.get("target"))
    number = int(target) if target.isdecimal() and len(target) <= len(str(len(pairs))) else len(pairs)
    if len(pairs) < 2 or number >= len(pairs):
        return None
    if not all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs):
        return None
    prompts = {pair[0] for pair in pairs}
    return {"prompt": prompts.pop(), "completion": pairs[number][1].strip()} if len(prompts) == 1 else None


FORMAT = Format("lm-eval", recognise, rows, "batch", frozenset(("filtered_resps",)))
