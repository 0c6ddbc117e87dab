"""What `lms log stream` prints: a prompt and the text that came of it, each under its fields up to the next time.

https://lmstudio.ai/docs/cli/serve/log-stream
"""

import itertools
import re
from collections.abc import Iterator

from hivetune.data.pieces.format import Lines, Log
from hivetune.data.pieces.printed import Step, pairing, prints, prompted, without_colours

_EVENT = re.compile(r"timestamp: [\d./-]+,? .*")
_FIELD = re.compile(r"(type|modelIdentifier|modelPath|input|output|stats):(?: (.*)|)", re.S)
_TEXTS = ("input", "output")  # a line of them may look like a field


_LAST = "timestamp: 0 "  # ends the last event


@pairing(prompted)
def rows(lines: Lines) -> Iterator[Step]:
    fields: dict[str, list[str]] = {}
    begin, name = 0, ""
    for number, line in itertools.chain(without_colours(lines), [(0, _LAST)]):
        match = _FIELD.fullmatch(line)
        if _EVENT.fullmatch(line):
            # A text as it was printed; older programs put it into quotes.
            texts = {key: "\n".join(value).rstrip("\n") for key, value in fields.items()}
            event = {k: t[1:-1] if len(t) > 1 and t[0] == t[-1] == '"' else t for k, t in texts.items()}
            kind, model = event.get("type"), event.get("modelIdentifier", "")
            if kind == "llm.prediction.input":
                prompt = event.get("input", "") + "\n"
                yield Step(begin, model, "asked", prompt, prompted(prompt))
            elif kind == "llm.prediction.output":
                yield Step(begin, model, "answered", event.get("output"))
            fields, begin, name = {}, number, ""
        elif match is not None and (name == "output" if match[1] == "stats" else name not in _TEXTS):
            name = match[1]
            fields[name] = [match[2]] if match[2] is not None else []
        elif name:
            fields[name].append(line)


FORMAT = Log("lms-log-stream", prints(r"^type: llm\.prediction\.input\r?$"), rows)
