"""The act on experts: after a promotion, the domains of the new champion are looked at (`experts.auto`)."""

from collections import Counter

from hivetune.cycle.acts.doing import Doing, SliceEnded
from hivetune.cycle.acts.night import Slice
from hivetune.errors import Stopped
from hivetune.experts.attended import Attended
from hivetune.experts.station import train_experts


def look_for_experts(doing: Doing) -> str:
    """As `hivetune experts CONFIG --train`, within the window: what is finished when it ends is kept."""
    slice_ = Slice(doing.allowed, doing.config.cycle.yield_to == "serving")

    def between() -> None:
        allowed = doing.allowed()
        if not allowed.now:
            raise SliceEnded(f"the window ended first: {allowed.reason}")

    try:
        made = train_experts(doing.config, Attended(doing.progress, slice_.terms(), between, not slice_.yields))
    except Stopped as error:
        if error.signal_number is not None:
            raise
        raise SliceEnded(f"{slice_.why}: {error.message}") from None
    counts = Counter(step.step for step in made.steps)
    doing.details["experts"] = dict(counts)
    steps = ", ".join(f"{count} {step}" for step, count in counts.items()) or "the rows have no domains"
    return "; ".join((steps, *made.problems))
