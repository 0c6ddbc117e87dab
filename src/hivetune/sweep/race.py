"""Which variants of a sweep go on: successive halving that needs evidence. Pure.

At a quarter and at a half of the steps the worse half stops, but only those of it whose loss on the validation rows is
shown to be higher than the leader's, row by row on the same rows. Successive halving: Jamieson and Talwalkar (AISTATS
2016); a race that stops on evidence: Maron and Moore (NIPS 1993).
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from hivetune.judge.statistics import ALPHA, Estimate, by_group, jackknife

# Shares of the steps at which is looked; the last stretch is run by all that are left.
LOOK_SHARES = (0.25, 0.5)


@dataclass(frozen=True)
class RowLosses:
    """At one validation: the nll of each row in nats. Rows are told by their number in the snapshot."""

    step: int
    nll: Mapping[int, float]


@dataclass(frozen=True)
class Loser:
    """A variant that stops. `worse`: nats per token above the leader, with its interval."""

    variant: int
    leader: int
    worse: Estimate

    @property
    def why(self) -> str:
        assert self.worse.ci95 is not None
        low, high = self.worse.ci95
        return f"{self.worse.value:+.3f} nats a token ({low:+.3f} to {high:+.3f}) above the leader"


def losers(
    losses: Mapping[int, RowLosses], tokens: Mapping[int, int], groups: Mapping[int, Hashable], *, looks: int
) -> list[Loser]:
    """Of the variants that are still in the race, those that stop now.

    `tokens`: trained tokens of each validation row; `groups`: what belongs together (a session). `looks`: how many
    there are in all; the level of an interval is shared by looks and comparisons (Bonferroni).
    """
    rows = sorted(set.intersection(*(set(one.nll) for one in losses.values()))) if losses else []
    total = sum(tokens[row] for row in rows)
    if len(losses) < 2 or not total:
        return []
    loss = {variant: math.fsum(one.nll[row] for row in rows) / total for variant, one in losses.items()}
    ranked = sorted(loss, key=lambda variant: (loss[variant], variant))
    leader, worse_half = ranked[0], ranked[math.ceil(len(ranked) / 2) :]
    alpha = ALPHA / (looks * len(worse_half))
    found = []
    for variant in worse_half:
        estimate = above(losses[variant], losses[leader], tokens, groups, alpha=alpha)
        if estimate.ci95 is not None and estimate.ci95[0] > 0:
            found.append(Loser(variant, leader, estimate))
    return found


def above(
    one: RowLosses,
    other: RowLosses,
    tokens: Mapping[int, int],
    groups: Mapping[int, Hashable],
    *,
    alpha: float = ALPHA,
) -> Estimate:
    """Nats per token of `one` less those of `other`, on the rows of both."""
    rows = sorted(set(one.nll) & set(other.nll))
    columns = [[one.nll[row] - other.nll[row] for row in rows], [float(tokens[row]) for row in rows]]
    units = by_group(columns, [groups[row] for row in rows])
    return jackknife(units, lambda sums: sums[0] / sums[1], alpha=alpha)
