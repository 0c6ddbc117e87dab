"""The router of a family is trained, certified on validation rows, and judged once on the test rows as it is served."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import write_json
from hivetune.base.typed import to_plain
from hivetune.data.frozen import general_questions
from hivetune.errors import HivetuneError, UsageError
from hivetune.experts.decide import RoutedDomain, ScoredUnit, routed_domains
from hivetune.experts.survey import ALONE, Attended, Survey, scored_rows
from hivetune.models.fetch import fetch_model
from hivetune.records import Progress
from hivetune.release.gguf import SERVED_QUANT, base_gguf
from hivetune.release.registry import Release, find
from hivetune.routing.choose import Asking, ExpertTable, choose, read_table, write_table
from hivetune.routing.domains import KEY_KINDS, ExpertRow, RowDomain, own_keys
from hivetune.routing.steps import newest_steps
from hivetune.routing.text_router import RoutedText, TextExpert, TextRouter, learn_router, route_text

MOST_A_DOMAIN = 400  # training rows of a domain that the router learns from: more cost hours of scoring
OWN_SHARE = 0.95  # of the rows with a key's value that must be a domain's, so that the value finds it


@dataclass(frozen=True)
class Routed:
    """`by_key`, `by_text`: each domain routed by what its rows declare, and by their text alone, against the shared
    adapter. `judged_on`: the base as it is served, or why not."""

    table: ExpertTable
    by_key: tuple[RoutedDomain, ...]
    by_text: tuple[RoutedDomain, ...]
    judged_on: str


@dataclass(frozen=True)
class Serving:
    """An expert that answers now: its domain, its champion, and the hash of the shared adapter that it was last held
    against."""

    domain: RowDomain
    release: Release
    parent: str


def serving(found: Survey) -> tuple[dict[str, Serving], list[str]]:
    """Experts of the shared release by name; and in words those that should serve and can't, or serve unchecked."""
    experts, problems = {}, []
    with closing(open_database()) as database:
        for name, step in newest_steps(database, found.shared.name).items():
            if step.step != "serving":
                continue
            try:
                release = find(database, name)
                release.check()
            except HivetuneError as error:
                problems.append(f"{name} can't serve, the shared adapter answers: {error.message}")
                continue
            if release.model_sha256 != found.shared.model_sha256:
                problems.append(f"{name} is of another base than {found.shared.label}, which answers instead")
                continue
            experts[name] = Serving(step.domain, release, step.parent)
    problems += [
        f"{name} answers unchecked: no test row declares {experts[name].domain.label} any more. Keep it, bring its rows"
        f" back, or take it out of service: hivetune registry retire {name}"
        for name in unchecked(found.rows, experts)
    ]
    return experts, problems


def unchecked(rows: Sequence[ExpertRow], experts: Mapping[str, Serving]) -> list[str]:
    """Experts whose domain has no test row: what becomes of them is a person's choice."""
    tests = [row.keys for row in rows if row.split == "test"]
    return [name for name, one in experts.items() if not any(map(one.domain.has, tests))]


def make_routes(found: Survey, told: Attended = ALONE) -> Routed:
    """The table of the family, written for the gateway, and what it is worth on the test rows.

    An expert for which some domain is worse by text is found by name and by key only.
    """
    experts, _ = serving(found)
    before = _table_before(found.shared.name)
    keys = keys_of(found.rows, {name: one.domain for name, one in experts.items()}, before.keys)
    if not experts:
        table = ExpertTable(found.shared.name)
        write_table(table)
        return Routed(table, (), (), "nothing to judge: no expert serves")
    adapters = adapter_folders(found, experts)
    gone = set(unchecked(found.rows, experts))
    if gone & {one.name for one in before.router.experts}:
        router = _kept(before.router, list(experts), gone)
    else:
        router = _learned(found, adapters, list(experts), told)
    table = ExpertTable(found.shared.name, tuple(experts), keys, router)
    base, said = as_served(found, told.bar("preparing the base as it is served"))
    rows = [row for row in found.rows if row.split == "test"]
    units = scored_rows(found, adapters, rows, model=base, progress=told.bar("scoring the test rows"))
    by_text = routed_by(table, found, rows, units, text=True)
    for _ in experts:  # a text that one expert loses may be the next one's
        harmed = {one.domain for one in by_text if one.worse}
        table = replace(table, router=_without(table, found, rows, harmed))
        by_text = routed_by(table, found, rows, units, text=True)
    by_key = routed_by(table, found, rows, units, text=False)
    write_table(table)
    routed = Routed(table, by_key, by_text, said)
    document = {"by_key": to_plain(by_key), "by_text": to_plain(by_text), "judged_on": said}
    write_json(found.folder / "routed.json", {"schema": 1, **document})
    return routed


def _table_before(shared: str) -> ExpertTable:
    try:
        return read_table(shared) or ExpertTable(shared)
    except UsageError:  # damaged: it is made anew, as the error tells people
        return ExpertTable(shared)


def _kept(router: TextRouter, names: Sequence[str], gone: set[str]) -> TextRouter:
    """The router as it was. One that is learned without the rows of `gone` would give their texts to others."""
    known = {one.name: one for one in router.experts}
    why_not = f"the router stays as it was while there are no rows for {', '.join(sorted(gone))}"
    experts = tuple(known.get(name, TextExpert(name, {}, threshold=None, why_not=why_not)) for name in names)
    return replace(router, experts=experts)


def adapter_folders(found: Survey, experts: Mapping[str, Serving]) -> dict[str, Path]:
    """Folders of the shared adapter and of the experts, as the matrix names them."""
    return {"shared": found.shared.folder, **{name: one.release.folder for name, one in experts.items()}}


def as_served(found: Survey, progress: Progress) -> tuple[Path | None, str]:
    """The base with the rounding of its served file, prepared for the engine; None where it can't be made."""
    try:
        file = base_gguf(found.config.model, found.shared.model_sha256, SERVED_QUANT, progress)
        return fetch_model(str(file), progress), f"the base in {SERVED_QUANT}, as it is served"
    except HivetuneError as error:
        return None, f"the base as it is trained: {error.message}"


def keys_of(
    rows: Sequence[ExpertRow],
    experts: Mapping[str, RowDomain],
    before: Mapping[str, Mapping[str, str | None]],
) -> dict[str, dict[str, str | None]]:
    """kind -> value -> expert, "" for rows of no expert, None for a value that several share and that decides nothing.

    A request may declare more than rows are divided by: an agent's system prompt finds its expert as well. Keys belong
    to the expert: those of its domain always, and of the others in `before` those that no row of today has.
    """
    owners: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        owner = next((name for name, domain in experts.items() if domain.has(row.keys)), "")
        for kind, value in row.keys.items():
            owners[kind, value][owner] += 1
    found: dict[str, dict[str, str | None]] = {kind: {} for kind in KEY_KINDS}
    for (kind, value), counts in owners.items():
        owner, count = counts.most_common(1)[0]
        found[kind][value] = owner if count >= OWN_SHARE * counts.total() else None
    for kind, values in before.items():
        found[kind] |= {value: name for value, name in values.items() if value not in found[kind] and name in experts}
    for kind, owned in own_keys(experts).items():
        found[kind] |= owned
    return {kind: values for kind, values in found.items() if values}


def routed_by(
    table: ExpertTable, found: Survey, rows: Sequence[ExpertRow], units: Sequence[ScoredUnit], *, text: bool
) -> tuple[RoutedDomain, ...]:
    """Each domain under the router, asked with what its rows declare, or with their text alone."""
    servable = {table.shared, *table.experts}
    groups: dict[str, list[ScoredUnit]] = {}
    for row, unit in zip(rows, units, strict=True):
        keys = {} if text else row.keys
        choice = choose({table.shared: table}, {}, Asking(table.shared, keys, row.text), servable)
        name = "shared" if choice.model == table.shared else choice.model
        domain = next((domain.label for domain in found.domains if domain.has(row.keys)), "no domain")
        groups.setdefault(domain, []).append(replace(unit, nats={**unit.nats, "routed": unit.nats[name]}))
    return tuple(routed_domains(groups))


def _learned(found: Survey, adapters: Mapping[str, Path], names: Sequence[str], told: Attended) -> TextRouter:
    rows = _sampled(found)
    units = scored_rows(found, adapters, rows, progress=told.bar("scoring rows for the router"))
    texts = [
        RoutedText(
            row.text,
            {name: (unit.nats["shared"] - unit.nats[name]) / max(1, unit.tokens) for name in names},
            held_out=row.split == "validation",
        )
        for row, unit in zip(rows, units, strict=True)
    ]
    outside = [question.messages[-1].content for question in general_questions()]
    return learn_router(texts, names, outside)


def _sampled(found: Survey) -> list[ExpertRow]:
    """All validation rows, and of the training rows at most MOST_A_DOMAIN of each domain and of what is in none."""
    taken: Counter[str | None] = Counter()
    chosen = []
    for row in sorted(found.rows, key=lambda row: blake2b(row.id.encode(), digest_size=8, key=b"router").digest()):
        value = row.keys.get(found.kind) if found.kind else None
        if row.split == "train":
            taken[value] += 1
        if row.split == "validation" or (row.split == "train" and taken[value] <= MOST_A_DOMAIN):
            chosen.append(row)
    return chosen


def _without(table: ExpertTable, found: Survey, rows: Sequence[ExpertRow], harmed: set[str]) -> TextRouter:
    """Without the thresholds of experts to which texts of `harmed` domains were routed."""
    guilty = set()
    for row in rows:
        if any(domain.label in harmed and domain.has(row.keys) for domain in found.domains):
            guilty.add(route_text(table.router, row.text).expert)
    experts = tuple(
        replace(one, threshold=None, why_not="a domain was not known to be safe from it on the test rows")
        if one.name in guilty
        else one
        for one in table.router.experts
    )
    return replace(table.router, experts=experts)


def routes_document(routed: Routed) -> dict[str, Any]:
    """For `--json`."""
    experts = [
        {"name": one.name, "threshold": one.threshold, "why_not": one.why_not} for one in routed.table.router.experts
    ]
    return {
        "experts": experts,
        "by_key": to_plain(routed.by_key),
        "by_text": to_plain(routed.by_text),
        "judged_on": routed.judged_on,
    }
