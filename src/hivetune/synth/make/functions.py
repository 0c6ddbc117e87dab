"""Questions about functions and classes of Python modules."""

import random
from collections.abc import Iterator

from hivetune.synth.make.draft import Draft, worded
from hivetune.synth.make.wording import deed, told
from hivetune.synth.sources.page import DocEntry, DocPage

LONGEST_SIGNATURE_CHARS = 300


def about_functions(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    examples = {example.explanation.partition(": ")[0]: example for example in page.examples}
    for entry in page.entries:
        if entry.kind == "function":
            said = told(entry.text)
            if said:
                example = examples.get(entry.names[0])
                yield from _about(page, entry, said, example.code if example else "", draw)


def _about(page: DocPage, entry: DocEntry, said: str, code: str, draw: random.Random) -> Iterator[Draft]:
    name = entry.names[0]
    module = page.label.removeprefix("Python ")
    fields = {"name": name, "short": name.removeprefix(f"{module}."), "module": module, "told": said, "topic": module,
              "usage": entry.usage, "page": page.label, "command": module}  # fmt: skip
    passage = f"{entry.usage}\n{entry.text}"
    yield Draft("call", (worded("call.meaning", draw, fields),), name, passage)
    action = deed(entry.text)
    if action and not name.rpartition(".")[2].startswith("_"):
        checker = {"name": "contains_any", "any": [name.rpartition(".")[2]]}
        turn = worded("call.which", draw, {**fields, "deed": action})
        yield Draft("which", (turn,), name, passage, checker=checker)
    has_arguments = entry.usage.endswith(")") and not entry.usage.endswith("()")
    if has_arguments and len(entry.usage) <= LONGEST_SIGNATURE_CHARS:
        turn = worded("call.usage", draw, fields)
        yield Draft("call", (turn,), name, passage)
    if code:
        turn = worded("call.example", draw, {**fields, "code": code})
        yield Draft("command", (turn,), name, f"{passage}\n{code}", python=(code,))
