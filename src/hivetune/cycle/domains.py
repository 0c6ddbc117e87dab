"""The domains of a name (`cycle.by`): each agent or category with enough rows gets a cycle of its own, as NAME-VALUE.

It is a cycle like any other, begun once after each promotion of NAME. Its rows are those of its value, in the splits
that all rows have, so that no session is trained on here and judged by there. It starts from the adapter of NAME's
champion and has to beat that champion on the domain's held-out rows, at a level that is divided by the number of
domains: all of them together replace it wrongly as often as one cycle does. If it does not, an earlier adapter of the
domain is retired: what it was better than is no longer served. The gateway routes to it what declares the value.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from hivetune.base.disk import read_json, write_json
from hivetune.config import RunConfig
from hivetune.cycle.record import DOMAIN, CycleRow
from hivetune.data.snapshot import PoolRow
from hivetune.errors import UsageError
from hivetune.release.registry import Release, check_release_name

MIN_ROWS = 200  # with fewer a domain has little to add to what all rows taught; not measured
MIN_HELD_OUT = 20  # sessions; with fewer no interval is narrow enough at a divided level


@dataclass(frozen=True)
class Domain:
    """A domain of the name `of`. `by`: agent or category. `shares`: how many domains share the error level."""

    of: str
    by: str
    value: str
    shares: int = 1

    @property
    def name(self) -> str:
        """Return the name of its releases."""
        return f"{self.of}-{re.sub('[^a-z0-9]+', '-', self.value).strip('-')}"

    def holds(self, row: PoolRow) -> bool:
        return _value(row, self.by) == self.value


def domains_of(config: RunConfig, rows: Iterable[PoolRow]) -> list[Domain]:
    """Return the domains that have enough rows, by name. A value that makes no name of a release, or the same one as
    another value, has none."""
    of, by = config.cycle.name, config.cycle.by
    if of is None or by is None:
        return []
    trained: Counter[str] = Counter()
    held_out: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        value = _value(row, by)
        trained[value] += row.split == "train"
        if row.split == "test" and row.answered_by is None:
            held_out[value].add(row.tied)
    values = [value for value, count in trained.items() if value and count >= MIN_ROWS]
    enough = [Domain(of, by, value) for value in values if len(held_out[value]) >= MIN_HELD_OUT]
    names = Counter(domain.name for domain in enough)
    usable = [domain for domain in enough if names[domain.name] == 1 and _is_name(domain.name)]
    return [Domain(of, by, domain.value, len(usable)) for domain in sorted(usable, key=lambda domain: domain.name)]


def _value(row: PoolRow, by: str) -> str:
    """Return a row's value as the gateway reads a request's."""
    return " ".join(((row.agent if by == "agent" else row.category) or "").split()).casefold()


def _is_name(name: str) -> bool:
    try:
        return bool(check_release_name(name))
    except UsageError:
        return False


def domain_config(config: RunConfig, domain: Domain, champion: Release) -> RunConfig:
    """Return the config of a domain's cycle, which starts from the adapter of NAME's champion."""
    cycle = config.cycle.model_copy(update={"name": domain.name})
    lora = config.lora.model_copy(update={"start": str(champion.folder)})
    return config.model_copy(update={"cycle": cycle, "lora": lora})


def write_domain(cycle: CycleRow, domain: Domain) -> None:
    write_json(cycle.folder / DOMAIN, {"schema": 1, **asdict(domain)})


def domain_of(cycle: CycleRow) -> Domain | None:
    """Return the domain that a cycle was opened for, None for a name's own cycle."""
    path = cycle.folder / DOMAIN
    if not path.exists():
        return None
    written = read_json(path)
    return Domain(written["of"], written["by"], written["value"], written["shares"])
