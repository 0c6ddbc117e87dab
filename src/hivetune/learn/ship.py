"""Whether stage 2 takes the place of stage 1: only if its answers succeed more often than those of both rivals. Pure.

The rivals are stage 1, and stage 1 with as many more steps: what more training alone would have done is no merit of the
bad answers.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from hivetune.config import GateConfig
from hivetune.judge.evaluate import SIDES
from hivetune.judge.gate import Evaluation, judge
from hivetune.records import Verdict

# By how much, compared with stage 1: nats per token of held-out rows; share of answers; ratio of characters.
MOST_WORSE_LOSS = 0.02
MOST_FEWER_ENDED = 0.02
# With fewer held-out rows that were called good, the loss of all of them counts.
LEAST_HELD_OUT = 20
LENGTH_RATIOS = (0.8, 1.25)


def preference_gate(gate: GateConfig) -> GateConfig:
    """What stage 2 has to show: that more answers succeed. Its loss, its lengths and its ends are safeguards."""
    return GateConfig(success_gain=max(0.0, gate.success_gain or 0.0), loss_gain=None, latency_ratio=None,
                      memory_ratio=None, least_kept=None, tolerance=gate.tolerance)  # fmt: skip


def safeguards(evaluation: Evaluation, good: Collection[int] | None = None) -> list[str]:
    """What stage 2 broke, in words: on the held-out rows, against the baseline of this evaluation. `good`: the rows
    whose loss counts; None: all of them."""
    broken = []
    held_out = [row for row in evaluation["rows"] if good is None or row["row"] in good]
    rows = [row for row in held_out if all(isinstance(row[side], float) for side in SIDES)]
    tokens = sum(row["tokens"] for row in rows)
    if len(rows) < len(held_out) or not tokens:
        broken.append("the loss of held-out rows is not known for both")
    else:
        base, tuned = (math.fsum(row[side] for row in rows) / tokens for side in SIDES)
        if tuned > base + MOST_WORSE_LOSS:
            broken.append(f"the loss of held-out rows rose from {base:.4f} to {tuned:.4f}")
    both = [answer for answer in evaluation["answers"] if all(answer[side]["answer"] is not None for side in SIDES)]
    if both:
        base, tuned = (sum(bool(answer[side]["ended"]) for answer in both) / len(both) for side in SIDES)
        if tuned < base - MOST_FEWER_ENDED:
            broken.append(f"{tuned:.0%} of the answers end by themselves, {base:.0%} did")
        base, tuned = (sum(len(answer[side]["answer"]) for answer in both) for side in SIDES)
        if not base or not LENGTH_RATIOS[0] <= tuned / base <= LENGTH_RATIOS[1]:
            ratio = f"{tuned / base:.2f} times" if base else "infinitely"
            broken.append(f"answers are {ratio} as long, outside of {LENGTH_RATIOS[0]} to {LENGTH_RATIOS[1]}")
    return broken


def choose_stage(
    evaluations: Mapping[str, Evaluation], gate: GateConfig, good: Collection[int] | None = None
) -> tuple[bool, dict[str, Verdict], list[str]]:
    """(whether stage 2 ships, the verdict against each rival, why). `evaluations`: rival -> stage 2 beside it; the
    first one is stage 1, against which the safeguards hold; `good` as there."""
    verdicts = {rival: judge(evaluation, preference_gate(gate)) for rival, evaluation in evaluations.items()}
    broken = safeguards(next(iter(evaluations.values())), good)
    reasons = [f"against {rival}: {reason}" for rival, verdict in verdicts.items() for reason in verdict.reasons[:1]]
    ships = not broken and all(verdict.verdict == "deploy" for verdict in verdicts.values())
    return ships, verdicts, [*broken, *reasons]


def why_no_stage2(bad_rows: int, least: int, validation_rows: Sequence[int], use: Sequence[str]) -> str:
    """Why there is nothing that a stage 2 could learn or be guarded by; empty: there is."""
    if not {"pairs", "failures"} & set(use):
        return "learn names neither pairs nor failures; with them: learn: [sft, corrections, pairs, failures]"
    if bad_rows < least:
        return f"{bad_rows} bad answers are left to learn from, learn.least_bad asks for {least}"
    if not validation_rows:
        return "there are no validation rows to guard it: raise data.validation"
    return ""
