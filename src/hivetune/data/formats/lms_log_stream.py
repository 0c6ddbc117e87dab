"""What `lms log stream` prints: a prompt and the text that came of it, each under its fields up to the next time.

https://lmstudio.ai/docs/cli/serve/log-stream
"""

import re
from collections.abc import Iterator

from hivetune.data.pieces.format import Format, Lines
from hivetune.data.pieces.printed import Step, pairing, prints, prompted, without_colours

_EVENT = re.compile(r"timestamp: [\d./-]+,? .*")
_FIELD = re.compile(r"(type|modelIdentifier|modelPath|input|output|stats):(?: (.*)|)", re.S)
_TEXTS = ("input", "output")  # a line of them may look like a field


@pairing(prompted)
def rows(lines: Lines) -> Iterator[Step]:
    for number, event in _events(without_colours(lines)):
        kind, model = event.get("type"), event.get("modelIdentifier", "")
        if kind == "llm.prediction.input":
            prompt = event.get("input", "") + "\n"
            yield Step(number, model, "asked", prompt, prompted(prompt))
        elif kind == "llm.prediction.output":
            yield Step(number, model, "answered", event.get("output"))


def _events(lines: Lines) -> Iterator[tuple[int, dict[str, str]]]:
    fields: dict[str, list[str]] = {}
    begin, name = 0, ""
    for number, line in lines:
        match = _FIELD.fullmatch(line)
        if _EVENT.fullmatch(line):
            yield begin, {key: _text(value) for key, value in fields.items()}
            fields, begin, name = {}, number, ""
        elif match is not None and (name == "output" if match[1] == "stats" else name not in _TEXTS):
            name = match[1]
            fields[name] = [match[2]] if match[2] is not None else []
        elif name:
            fields[name].append(line)
    yield begin, {key: _text(value) for key, value in fields.items()}


def _text(lines: list[str]) -> str:
    """Return a text as it was printed; older programs put it into quotes."""
    text = "\n".join(lines).rstrip("\n")
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


FORMAT = Format("lms-log-stream", prints(r"^type: llm\.prediction\.input\r?$"), rows, "file")
