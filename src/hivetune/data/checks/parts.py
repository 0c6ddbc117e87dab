"""Parts of a row that the user leaves out: calls of tools with their results, and reasoning (data.on_tools, ...)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from hivetune.data.reasons import RowRefused
from hivetune.data.rows.read import ReadRow
from hivetune.records import Message


class PartPolicies(Protocol):
    """The settings that are asked, of a job of prepare/examine/stages.py."""

    @property
    def on_tools(self) -> str: ...
    @property
    def on_reasoning(self) -> str: ...


def leave_parts_out(read: ReadRow, job: PartPolicies) -> ReadRow:
    """The row with the parts that its user wants to train. Raises RowRefused where no answer is left."""
    example, changed = read.example, list(read.changed)
    if job.on_reasoning == "leave_out" and any(m.reasoning for m in example.messages):
        example = replace(example, messages=tuple(replace(m, reasoning=None) for m in example.messages))
        changed.append("reasoning-left-out")
    if job.on_tools == "leave_out" and (example.tools or any(map(_uses_tools, example.messages))):
        messages = tuple(_plain_turns(example.messages))
        last = example.messages[-1]
        if not any(m.role == "assistant" and m.weight for m in messages) or (
            example.lesson != "sft" and messages[-1] is not last  # the judged answer is the last one
        ):
            raise RowRefused("only-tool-calls")
        worse = None if example.worse is not None and example.worse.tool_calls else example.worse
        example = replace(example, messages=messages, tools=(), worse=worse)
        changed.append("tools-left-out")
    return read._replace(example=example, changed=tuple(changed))


def _plain_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Each question with what was answered in words behind the last call; a question without such an answer is left
    out too. What an agent says before a call ("I'll look at it") would teach it to say that and stop.
    """
    start = 0
    while start < len(messages):
        end = start + 1
        while end < len(messages) and messages[end].role not in ("system", "user"):
            end += 1
        head, rest = messages[start], messages[start + 1 : end]
        used = [n for n, message in enumerate(rest) if _uses_tools(message)]
        answers = rest[max(used) + 1 :] if used else rest
        if (answers or not used) and not _uses_tools(head):
            yield head
            yield from answers
        start = end


def _uses_tools(message: Message) -> bool:
    return bool(message.tool_calls) or message.role == "tool"
