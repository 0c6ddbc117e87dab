"""Items of OpenAI's Responses: tools that the provider ran itself, of which a log does not hold what they found, and
turns that say nothing. A search of the web is no such tool: its answer says what was found.
"""

from typing import Any

from hivetune.data.pieces.said import one_of

HIDDEN_CALLS = ("file_search_call", "code_interpreter_call")


def is_of_answer(item: dict[str, Any]) -> bool:
    """Whether the model wrote an item: its words, thoughts and calls."""
    return item.get("role", "assistant") == "assistant" and not str(item.get("type")).endswith("_output")


def unlearn_answer(items: list[dict[str, Any]], end: int) -> None:
    """The answer in front of `end` is read and not learned, with its thoughts and calls."""
    for item in reversed(items[:end]):
        if not is_of_answer(item):
            return
        item["weight"] = 0


def unlearn_what_rests_on_hidden_calls(items: list[Any]) -> list[Any]:
    """Items without such calls; the turn of each, in front of it and behind, is read and not learned."""
    if not any(one_of(item, "type") in HIDDEN_CALLS for item in items):
        return items
    items = [{**item} for item in items if isinstance(item, dict)]
    hidden = False
    for place, item in enumerate(items):
        if item.get("type") in HIDDEN_CALLS:
            unlearn_answer(items, place)
            hidden = True
        hidden = hidden and item.get("role") != "user"
        if hidden and is_of_answer(item):
            item["weight"] = 0
    return [item for item in items if item.get("type") not in HIDDEN_CALLS]


def without_silent_turns(items: list[Any]) -> list[Any]:
    """Items without those that a program logs as the user's between a call and its result, empty."""
    kept: list[Any] = []
    for item, following in zip(items, [*items[1:], None], strict=False):
        between = one_of(kept[-1] if kept else None, "type"), one_of(following, "type")
        if between != ("function_call", "function_call_output") or one_of(item, "content") != "":
            kept.append(item)
    return kept
