"""Samples of lm-eval with choices: the one that it calls right, after what stands before all of them.

https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/interface.md (`--log_samples`)
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, listed, names


def rows(record: Row) -> Iterator[Row]:
    """Yield the choice that lm-eval calls correct, after the text before all choices."""
    args = record.get("arguments")
    calls = list(args.values()) if isinstance(args, dict) else listed(args)
    pairs = [tuple(call.values() if isinstance(call, dict) else listed(call)) for call in calls if call]
    target = str(record.get("target"))
    number = int(target) if target.isdecimal() and len(target) <= len(str(len(pairs))) else len(pairs)
    if len(pairs) < 2 or number >= len(pairs):
        return
    are_texts = all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs)
    if are_texts and len({prompt for prompt, _ in pairs}) == 1:
        yield {"prompt": pairs[0][0], "completion": pairs[number][1].strip()}


FORMAT = Batch("lm-eval", rows, needs=names("filtered_resps"))
