"""How many rows each category and each kind gets: by weight, and what one can't fill goes to the others."""

from collections.abc import Mapping


def share_out(total: int, weights: Mapping[str, float], most: Mapping[str, int] | None = None) -> dict[str, int]:
    """`total` whole parts by weight (largest remainders), none above its `most`; what is cut is shared out again.

    The sum is `total`, or the sum of `most` where that is less. Weights of 0 get nothing.
    """
    given = dict.fromkeys(weights, 0)
    open_ = {name for name, weight in weights.items() if weight > 0}
    left = total
    while left > 0 and open_:
        whole = sum(weights[name] for name in open_)
        exact = {name: left * weights[name] / whole for name in sorted(open_)}
        parts = {name: int(value) for name, value in exact.items()}
        rest = left - sum(parts.values())
        for name in sorted(exact, key=lambda name: (parts[name] - exact[name], name))[:rest]:
            parts[name] += 1
        for name, part in parts.items():
            room = part if most is None else min(part, most[name] - given[name])
            given[name] += room
            left -= room
        open_ = {name for name in open_ if most is not None and given[name] < most[name]}
    return given
