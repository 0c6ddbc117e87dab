"""The row of a call whose prompt was printed as a template wrote it."""

from collections.abc import Iterator

from hivetune.data.pieces.logs import PlacedRow, conversation
from hivetune.data.pieces.rendered import is_rendered, turns_of


def prompted(place: int, prompt: str, answer: str | None, finish: str | None) -> Iterator[PlacedRow]:
    turns = turns_of(prompt)
    if turns is None:
        turns = [{"role": "user", "content": prompt}] if not is_rendered(prompt) else None
    if turns is None:
        yield place, {"prompt_of_unknown_template": prompt, "completion": answer}
        return
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    if finish is not None and finish not in ("stop", "tool_calls", "None"):
        response = {"choices": [{"message": turns[-1], "finish_reason": finish}]}
        yield place, {"request": {"messages": turns[:-1]}, "response": response}
        return
    yield from conversation("vllm", place, turns, ())
