"""The frozen dataclasses that packages exchange. They have no behaviour but sums.

The order: Interaction -> Example -> Rendered -> Plan -> run -> evaluation -> Verdict.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "validation", "test"]
VerdictName = Literal["deploy", "iterate", "abort", "not-enough-evidence"]
# The kinds of rows: a good answer; a person's correction; the better of two; a bad answer, alone or before a retry.
LessonKind = Literal["sft", "correction", "pair", "failure", "retry"]
# Reports progress: the number of items done, and the total if it is known.
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    `weight` 0 means: read, but not trained on (OpenAI's field). `reasoning`: the assistant's thoughts before its
    answer, without markers such as `<think>`, if the row has a field for them (`reasoning_content`, `reasoning`,
    `thinking`); the template decides how it is written. `tool_calls`: calls of the assistant,
    each {"type": "function", "function": {"name": text, "arguments": object}, "id": text, if there is one};
    `tool_call_id` and `name`: the call that a tool's result answers, and the tool. Tools are in `Example.tools`.
    """

    role: Role
    content: str
    weight: float = 1.0  # of the turn in the loss
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One usable row.

    `id` is the hash of its content, `source` is `file:line`, `answered_by` the release whose unedited answer it holds.
    `lesson` is "failure" if the last answer is bad; `worse` is a worse answer in place of the last one. `maker`: the
    source of a synthetic row. `client`: the owner of the gateway token, which a quota counts instead of `user`.
    """

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
    """Token ids, each with 1 if it is trained. Position i predicts token i + 1, so `trained[0]` is always 0.

    They are the first `num_messages` messages of a row, of which the `answers` are trained.
    """

    tokens: tuple[int, ...]
    trained: bytes
    num_messages: int = 1
    answers: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Accounting:
    """The counts of rows: each input row is in exactly one of them. Every report has the same keys."""

    rows_in: int = 0
    trained: int = 0
    held_out: int = 0
    duplicates: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    set_aside: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
    not_reached: int = 0  # max_steps or max_rows ended before them

    @property
    def missing(self) -> int:
        """Return the number of rows in no count; anything but 0 is a bug."""
        placed = self.trained + self.held_out + self.duplicates + self.quarantined + self.not_reached
        return self.rows_in - placed - sum(self.rejected.values()) - sum(self.set_aside.values())


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of the plan: snapshot row numbers, and the tokens that its loss is divided by."""

    rows: tuple[int, ...]
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the verdict's table.

    `gain` is positive where the tuned model is better, `interval` its interval at `level`, which decides; without a
    base, the interval is that of `tuned`. `passed` is None for metrics that are only reported. `needed` is the number
    of rows that would decide an open metric.
    """

    name: str
    base: float | None
    tuned: float | None
    n: int
    threshold: float | None
    passed: bool | None
    required: bool = False
    needed: int | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    level: float = 0.95


@dataclass(frozen=True, slots=True)
class Advice:
    """A change for the next run, with the measurement behind it. `rows`: the places that show it."""

    said: str
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict. `reasons` name every metric; the first `decisive` of them led to it."""

    verdict: VerdictName
    reasons: tuple[str, ...]
    metrics: tuple[Metric, ...]
    advice: tuple[Advice, ...] = ()
    decisive: int = 0


def silent(done: int, total: int | None) -> None:
    """A `Progress` that shows nothing."""
