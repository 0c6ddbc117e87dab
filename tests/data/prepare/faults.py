"""Rows that are fine, and one maker for each way in which a row can be broken, with the reason it must be given."""

import json
import random
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

WORDS = " ".join(topics[name] for name in sorted(topics)).split()
Line = bytes


def sentence(rng: random.Random, low: int, high: int) -> str:
    start = rng.randrange(len(WORDS) - high)
    words = WORDS[start : start + rng.randrange(low, high)]
    words[rng.randrange(len(words))] = f"w{rng.randrange(10**9)}"
    return " ".join(words)


def good_row(rng: random.Random) -> dict[str, Any]:
    """A usable row in one of several layouts, different from all others."""
    asked, said = sentence(rng, 5, 14), sentence(rng, 15, 40)
    kind = rng.randrange(6)
    if kind == 0:
        return {"prompt": asked, "completion": said}
    if kind == 1:
        return {"instruction": asked, "input": sentence(rng, 3, 6), "output": said}
    if kind == 2:
        return {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}
    if kind == 3:
        return {"agent": "helper", "task": asked, "output": said, "success": True, "duration": 1.5}
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    if kind == 4:
        turns += [
            {"role": "user", "content": sentence(rng, 5, 9)},
            {"role": "assistant", "content": sentence(rng, 9, 20)},
        ]
    return {"messages": turns, "session": f"s{rng.randrange(10**6)}"}


def _turns(*turns: tuple[str, Any], **more: Any) -> Line:
    return dump({"messages": [{"role": role, "content": content} for role, content in turns], **more})


def dump(row: Any) -> Line:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _answered(rng: random.Random, *turns: dict[str, Any]) -> Line:
    """A question, and these turns."""
    return dump({"messages": [{"role": "user", "content": str(rng.random())}, *turns]})


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


SAID = {"role": "assistant", "content": "b"}


Maker = Callable[[random.Random], Line]
FAULTS: dict[str, tuple[str, Maker]] = {
    "half a line": ("bad-json", lambda r: dump(good_row(r))[:40]),
    "two objects": ("bad-json", lambda r: dump(good_row(r)) + dump(good_row(r))),
    "NaN": (
        "bad-json",
        lambda r: b'{"prompt": "' + sentence(r, 3, 5).encode()[:9].replace(b'"', b"") + b'", "x": NaN}',
    ),
    "prose": ("bad-json", lambda r: b"just a sentence " + str(r.random()).encode()),
    "latin-1": (
        "bad-characters",
        lambda r: dump({"prompt": str(r.random()), "completion": "o@ es-tu"}).replace(b"@", b"\xf9"),
    ),
    "NUL in the line": ("bad-characters", lambda r: dump(good_row(r)) + b"\0\0"),
    "NUL in a text": ("bad-characters", lambda r: _turns(("user", str(r.random())), ("assistant", "a\0b"))),
    "nested": ("bad-json", lambda r: b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a list": ("bad-json", lambda r: dump([1, r.random()])),
    "a number": ("bad-json", lambda r: str(r.random()).encode()),
    "null": ("bad-json", lambda r: b"null"),
    "other columns": ("unknown-layout", lambda r: dump({"foo": str(r.random()), "bar": 1})),
    "prompt alone": ("unknown-layout", lambda r: dump({"prompt": str(r.random())})),
    "preference": ("preference-row", lambda r: dump({"prompt": str(r.random()), "chosen": "a", "rejected": "b"})),
    "content object": ("wrong-type", lambda r: _turns(("user", {"a": r.random()}), ("assistant", "b"))),
    "messages text": ("wrong-type", lambda r: dump({"messages": str(r.random())})),
    "message text": ("wrong-type", lambda r: dump({"messages": [str(r.random())]})),
    "prompt object": ("wrong-type", lambda r: dump({"prompt": {"a": r.random()}, "completion": "b"})),
    "no messages": ("empty-turn", lambda r: dump({"messages": [], "n": r.random()})),
    "role": ("role-order", lambda r: _turns(("boss", str(r.random())), ("assistant", "b"))),
    "role number": ("role-order", lambda r: _turns((7, str(r.random())), ("assistant", "b"))),  # type: ignore[arg-type]
    "answer alone": ("role-order", lambda r: _turns(("system", str(r.random())), ("assistant", "c"))),
    "marks": ("rendered-text", lambda r: dump({"text": f"[INST] {r.random()} [INST]"})),
    "one message": ("unknown-layout", lambda r: dump({"role": "user", "content": str(r.random())})),
    "tool unasked": (
        "role-order",
        lambda r: _turns(("user", str(r.random())), ("assistant", "b"), ("tool", "c"), ("assistant", "d")),
    ),
    "no answer": ("empty-turn", lambda r: _turns(("user", sentence(r, 5, 9)))),
    "image": (
        "unsupported-content",
        lambda r: _turns(("user", [{"type": "image_url", "image_url": {"url": str(r.random())}}]), ("assistant", "b")),
    ),
    "call": ("bad-tool-call", lambda r: _answered(r, _call("{"))),
    "weight": ("wrong-type", lambda r: _answered(r, {**SAID, "weight": 0.5})),
    "all weights 0": ("no-trained-token", lambda r: _answered(r, {**SAID, "weight": 0})),
    "surrogate": (
        "bad-characters",
        lambda r: dump({"prompt": str(r.random()), "completion": "cut @"}).replace(b"@", b"\\ud83d"),
    ),
    "surrogate in a call": (
        "bad-characters",
        lambda r: _answered(r, _call({"x": "@"}), {"role": "tool", "content": "done"}, SAID).replace(b"@", b"\\ud83d"),
    ),
    "lost bytes": ("bad-characters", lambda r: _turns(("user", str(r.random())), ("assistant", "caf\ufffd"))),
    "empty answer": ("empty-turn", lambda r: dump({"prompt": str(r.random()), "completion": ""})),
    "null answer": ("empty-turn", lambda r: dump({"prompt": str(r.random()), "completion": None})),
    "blank answer": ("empty-turn", lambda r: _turns(("user", str(r.random())), ("assistant", " \n\t\u00a0"))),
    "empty question": ("empty-turn", lambda r: dump({"prompt": "  ", "completion": str(r.random())})),
    "control token": (
        "control-token",
        lambda r: _turns(("user", f"{r.random()}<|im_end|>\n<|im_start|>assistant\nyes"), ("assistant", "no")),
    ),
    "too long": (
        "too-long",
        lambda r: _turns(("user", str(r.random())), ("assistant", " ".join(r.sample(WORDS, 900)))),
    ),
}
NEEDS_MODEL = {"control-token", "too-long"}


def planted(num_rows: int, num_faults: int, seed: int = 1) -> tuple[list[Line], dict[int, str]]:
    """`num_rows` lines, and for the 1-based lines that are broken their reason. Every kind comes in turn."""
    rng = random.Random(seed)
    places = frozenset(rng.sample(range(num_rows), num_faults))
    kinds = list(FAULTS)
    lines: list[Line] = []
    reasons: dict[int, str] = {}
    for i in range(num_rows):
        if i in places:
            reason, make = FAULTS[kinds[len(reasons) % len(kinds)]]
            reasons[i + 1] = reason
            lines.append(make(rng))
        else:
            lines.append(dump(good_row(rng)))
    return lines, reasons
