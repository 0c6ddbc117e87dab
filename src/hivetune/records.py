"""The frozen values that cross from one room to another, and the vocabulary of the accounting. No behaviour but sums.

The walk: Interaction -> Example -> Rendered -> Plan -> run -> evaluation -> Verdict.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "validation", "test"]
VerdictName = Literal["deploy", "iterate", "abort", "not-enough-evidence"]
# What a row teaches: a good answer; a person's correction; the better of two; a bad answer, alone or before a retry.
LessonKind = Literal["sft", "correction", "pair", "failure", "retry"]
# How long work tells how far it is: items done, and all of them where the number is known.
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    `weight` 0 means: read, but not trained on (OpenAI's field). `reasoning`: what the assistant thought before its
    answer, without markers such as `<think>`, where the row keeps it in a field of its own (`reasoning_content`,
    `reasoning`, `thinking`); the template decides how it is written. `tool_calls`: calls of the assistant,
    each {"type": "function", "function": {"name": text, "arguments": object}, "id": text, if there is one};
    `tool_call_id` and `name`: the call that a tool's result answers, and the tool. Tools are in `Example.tools`.
    """

    role: Role
    content: str
    weight: float = 1.0
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One usable row. `id` is the hash of its content (equal rows have equal ids); `source` is `file:line`;
    `answered_by` the release whose own, unedited answer it holds. `lesson`: failure if the last answer is a bad one;
    `worse`: a worse answer in place of the last one. `maker`: what made a synthetic row. `client`: whose token asked at
    the gateway, which a quota counts, whatever user the request named."""

    id: str
    source: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    agent: str | None = None
    category: str | None = None
    session: str | None = None
    user: str | None = None
    time: float | None = None
    success: bool | None = None
    feedback: float | None = None
    checker: Mapping[str, Any] | None = None
    untrusted: bool = False
    answered_by: str | None = None
    lesson: LessonKind = "sft"
    worse: Message | None = None
    maker: str | None = None
    client: str | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids and, for each, 1 if it is trained. Position i predicts token i + 1, so `trained[0]` is always 0."""

    tokens: tuple[int, ...]
    trained: bytes


@dataclass(frozen=True)
class Accounting:
    """Law 1: every row that came in is in exactly one place. The same keys in every report."""

    rows_in: int = 0
    trained: int = 0
    held_out: int = 0
    duplicates: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    set_aside: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
    not_reached: int = 0

    @property
    def missing(self) -> int:
        """Rows that are in no place; anything but 0 is a bug."""
        placed = self.trained + self.held_out + self.duplicates + self.quarantined + self.not_reached
        return self.rows_in - placed - sum(self.rejected.values()) - sum(self.set_aside.values())


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of the plan: snapshot row numbers, and the tokens that its loss is divided by."""

    rows: tuple[int, ...]
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the verdict's table. `difference` is tuned - base; `passed` is None for what is only reported;
    `anytime95` holds at every n at once (loss only), `ci95` at this n; `needed` is the n that would decide, while it is
    open."""

    name: str
    base: float | None
    tuned: float | None
    difference: float | None
    ci95: tuple[float, float] | None
    n: int
    threshold: float | None
    passed: bool | None
    required: bool = False
    anytime95: tuple[float, float] | None = None
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change before the next run, and the measurement that says so. `rows`: places, or what else shows it."""

    about: str
    said: str
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """`reasons` name every metric; the first `decisive` of them made the verdict."""

    verdict: VerdictName
    reasons: tuple[str, ...]
    metrics: tuple[Metric, ...]
    advice: tuple[Advice, ...] = ()
    decisive: int = 0


def silent(done: int, total: int | None) -> None:
    """A `Progress` that tells nobody."""
