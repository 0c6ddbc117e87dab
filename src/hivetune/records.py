"""The frozen dataclasses that packages exchange. They have no behaviour but sums.

The order: Interaction -> Example -> Rendered -> Plan -> run -> evaluation -> Verdict.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "validation", "test"]
VerdictName = Literal["deploy", "iterate", "abort", "not-enough-evidence"]
# The kinds of rows: a good answer; a person's correction; the better of two; a bad answer alone.
LessonKind = Literal["sft", "correction", "pair", "failure"]
# Reports progress: the number of items done, and the total if it is known.
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. The tools are in `Example.tools`."""

    role: Role
    content: str
    weight: float = 1.0  # of the turn in the loss; 0: read, but not trained on (OpenAI's field)
    name: str | None = None  # of the tool whose result it is
    # Of the assistant, each {"type": "function", "function": {"name": text, "arguments": object}}, some with an "id".
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None  # the call that a tool's result answers
    # The assistant's thoughts before its answer, without marks such as `<think>`, which are the template's to write.
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One usable row."""

    id: str  # the hash of its content
    source: str  # file:line
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
    answered_by: str | None = None  # the release whose unedited answer it holds
    lesson: LessonKind = "sft"  # "failure": the last answer is bad
    worse: Message | None = None  # an answer in place of the last one
    maker: str | None = None  # of a synthetic row
    client: str | None = None  # the owner of the gateway token, which a quota counts instead of `user`


@dataclass(frozen=True, slots=True)
class Rendered:
    """The token ids of a row's first messages, without those that are `skipped` after its system prompt."""

    tokens: tuple[int, ...]
    trained: bytes  # 1 for each that is trained; position i predicts token i + 1, so the first is always 0
    num_messages: int = 1
    answers: tuple[int, ...] = (0,)  # the messages that are trained, counted without the skipped ones
    skipped: int = 0


@dataclass(frozen=True)
class Accounting:
    """The numbers of rows by fate: each input row is counted in exactly one field. Every report has the same fields."""

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
        """Return the number of rows that no field counts. Anything but 0 is a bug."""
        placed = self.trained + self.held_out + self.duplicates + self.quarantined + self.not_reached
        return self.rows_in - placed - sum(self.rejected.values()) - sum(self.set_aside.values())


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of the plan: row numbers of the snapshot, and the number of tokens that divides its loss."""

    rows: tuple[int, ...]
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the verdict's table of metrics."""

    name: str
    base: float | None
    tuned: float | None
    n: int
    threshold: float | None
    passed: bool | None  # None: only reported
    required: bool = False
    needed: int | None = None  # rows that would decide an open metric
    gain: float | None = None  # positive where the tuned model is better
    interval: tuple[float, float] | None = None  # of the gain at `level`, which decides; without a base, of `tuned`
    level: float = 0.95


@dataclass(frozen=True)
class Verdict:
    """The verdict on an evaluation, with its reasons and metrics."""

    verdict: VerdictName
    reasons: tuple[str, ...]  # they name every metric
    metrics: tuple[Metric, ...]
    decisive: int = 0  # the number of first reasons that led to it


def silent(done: int, total: int | None) -> None:
    """A `Progress` that shows nothing."""
