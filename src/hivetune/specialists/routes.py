"""The router of a family: trained, certified on validation rows, and judged once on the test rows as it is served."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_json
from hivetune.base.typed import to_plain
from hivetune.data.frozen import general_questions
from hivetune.errors import HivetuneError, UsageError
from hivetune.models.fetch import fetch_model
from hivetune.records import Progress
from hivetune.release.gguf import SERVED_QUANT, base_gguf
from hivetune.routing.choose import Asking, SpecialistTable, choose, read_table, write_table
from hivetune.routing.domains import KEY_KINDS, KeyedRow, RowDomain, own_keys
from hivetune.routing.text_router import RoutedText, TextRouter, TextSpecialist, learn_router, route_text
from hivetune.specialists.decide import RoutedDomain, ScoredUnit, routed_domains
from hivetune.specialists.survey import ALONE, Attended, Serving, Survey, scored_rows, serving, unchecked

MAX_A_DOMAIN = 400  # training rows of a domain that the router learns from: more cost hours of scoring
OWN_SHARE = 0.95  # of the rows with a key's value that must be a domain's, so that the value finds it


@dataclass(frozen=True)
class Routed:
    """The family's table and its gain. `by_key`, `by_text`: each domain routed by its keys, and by its text alone.
    `judged_on`: the served base, or the reason for another one.
    """

    table: SpecialistTable
    by_key: tuple[RoutedDomain, ...]
    by_text: tuple[RoutedDomain, ...]
    judged_on: str


def make_routes(survey: Survey, attended: Attended = ALONE) -> Routed:
    """Write the family's table for the gateway, and measure its gain on the test rows. If a text route makes a domain
    worse, the specialist answers only by name and key.
    """
    specialists, _ = serving(survey)
    before = _table_before(survey.shared.name)
    keys = keys_of(survey.rows, {name: s.domain for name, s in specialists.items()}, before.keys)
    if not specialists:
        table = SpecialistTable(survey.shared.name)
        write_table(table)
        return Routed(table, (), (), "nothing to judge: no expert serves")
    adapters = adapter_folders(survey, specialists)
    untested = set(unchecked(survey.rows, specialists))
    if untested & {s.name for s in before.router.specialists}:
        router = _router_as_before(before.router, list(specialists), untested)
    else:
        router = _learned(survey, adapters, list(specialists), attended)
    table = SpecialistTable(survey.shared.name, tuple(specialists), keys, router)
    base, basis = as_served(survey, attended.bar("preparing the base as it is served"))
    rows = [row for row in survey.rows if row.split == "test"]
    units = scored_rows(survey, adapters, rows, model=base, progress=attended.bar("scoring the test rows"))
    by_text = routed_by(table, survey, rows, units, text=True)
    for _ in specialists:  # a text that one expert loses may be the next one's
        table = replace(table, router=_without(table, survey, rows, {s.domain for s in by_text if s.worse}))
        by_text = routed_by(table, survey, rows, units, text=True)
    by_key = routed_by(table, survey, rows, units, text=False)
    write_table(table)
    routed = Routed(table, by_key, by_text, basis)
    document = {"by_key": to_plain(by_key), "by_text": to_plain(by_text), "judged_on": basis}
    write_json(survey.folder / "routed.json", {"schema": 1, **document})
    return routed


def _table_before(shared: str) -> SpecialistTable:
    try:
        return read_table(shared) or SpecialistTable(shared)
    except UsageError:  # damaged: it is made anew, as the error tells people
        return SpecialistTable(shared)


def _router_as_before(router: TextRouter, names: Sequence[str], untested: set[str]) -> TextRouter:
    """Return the router as it was.

    A router that is learned without the rows of `untested` would give their texts to others.
    """
    by_name = {s.name: s for s in router.specialists}
    reason = f"the router is unchanged, since there are no rows for {', '.join(sorted(untested))}"
    specialists = tuple(by_name.get(name, TextSpecialist(name, {}, threshold=None, why_not=reason)) for name in names)
    return replace(router, specialists=specialists)


def adapter_folders(survey: Survey, specialists: Mapping[str, Serving]) -> dict[str, Path]:
    """Return the folders of the shared adapter and of the specialists, by their names in the matrix."""
    return {"shared": survey.shared.folder, **{name: s.release.folder for name, s in specialists.items()}}


def as_served(survey: Survey, progress: Progress) -> tuple[Path | None, str]:
    """Return the base with the rounding of its served file, prepared for the engine; None if that fails."""
    try:
        file = base_gguf(survey.config.model, survey.shared.model_sha256, SERVED_QUANT, progress)
        return fetch_model(str(file), progress), f"the base in {SERVED_QUANT}, as it is served"
    except HivetuneError as error:
        return None, f"the base as it is trained: {error.message}"


def keys_of(
    rows: Sequence[KeyedRow],
    specialists: Mapping[str, RowDomain],
    before: Mapping[str, Mapping[str, str | None]],
) -> dict[str, dict[str, str | None]]:
    """Return kind -> value -> specialist, "" for rows of no specialist, None for a value that several share.

    A request may declare more than rows are divided by: an agent's system prompt finds its specialist as well. Keys
    belong to the specialist: those of its domain always, and of the others in `before` those that no row of today has.
    """
    owners: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        owner = next((name for name, domain in specialists.items() if domain.has(row.keys)), "")
        for kind, value in row.keys.items():
            owners[kind, value][owner] += 1
    keys: dict[str, dict[str, str | None]] = {kind: {} for kind in KEY_KINDS}
    for (kind, value), counts in owners.items():
        owner, count = counts.most_common(1)[0]
        keys[kind][value] = owner if count >= OWN_SHARE * counts.total() else None
    for kind, values in before.items():
        keys[kind] |= {value: name for value, name in values.items() if value not in keys[kind] and name in specialists}
    for kind, owned in own_keys(specialists).items():
        keys[kind] |= owned
    return {kind: values for kind, values in keys.items() if values}


def routed_by(
    table: SpecialistTable, survey: Survey, rows: Sequence[KeyedRow], units: Sequence[ScoredUnit], *, text: bool
) -> tuple[RoutedDomain, ...]:
    """Judge each domain under the router, asked with what its rows declare, or with their text alone."""
    servable = {table.shared, *table.specialists}
    groups: dict[str, list[ScoredUnit]] = {}
    for row, unit in zip(rows, units, strict=True):
        keys = {} if text else row.keys
        choice = choose({table.shared: table}, {}, Asking(table.shared, keys, row.text), servable)
        name = "shared" if choice.model == table.shared else choice.model
        domain = next((domain.label for domain in survey.domains if domain.has(row.keys)), "no domain")
        groups.setdefault(domain, []).append(replace(unit, nats={**unit.nats, "routed": unit.nats[name]}))
    return tuple(routed_domains(groups))


def _learned(survey: Survey, adapters: Mapping[str, Path], names: Sequence[str], attended: Attended) -> TextRouter:
    rows = _sampled(survey)
    units = scored_rows(survey, adapters, rows, progress=attended.bar("scoring rows for the router"))
    texts = [
        RoutedText(
            row.text,
            {name: (unit.nats["shared"] - unit.nats[name]) / max(1, unit.tokens) for name in names},
            held_out=row.split == "validation",
        )
        for row, unit in zip(rows, units, strict=True)
    ]
    return learn_router(texts, names, [question.messages[-1].content for question in general_questions()])


def _sampled(survey: Survey) -> list[KeyedRow]:
    """Return all validation rows, and at most MAX_A_DOMAIN training rows of each domain and of the rows in none."""
    counts: Counter[str | None] = Counter()
    chosen = []
    for row in sorted(survey.rows, key=lambda row: blake2b(row.id.encode(), digest_size=8, key=b"router").digest()):
        value = row.keys.get(survey.kind) if survey.kind else None
        if row.split == "train":
            counts[value] += 1
        if row.split == "validation" or (row.split == "train" and counts[value] <= MAX_A_DOMAIN):
            chosen.append(row)
    return chosen


def _without(table: SpecialistTable, survey: Survey, rows: Sequence[KeyedRow], harmed: set[str]) -> TextRouter:
    """Return the router without the thresholds of specialists to which texts of `harmed` domains were routed."""
    guilty = set()
    for row in rows:
        if any(domain.label in harmed and domain.has(row.keys) for domain in survey.domains):
            guilty.add(route_text(table.router, row.text).specialist)
    specialists = tuple(
        replace(s, threshold=None, why_not="a domain was not known to be safe from it on the test rows")
        if s.name in guilty
        else s
        for s in table.router.specialists
    )
    return replace(table.router, specialists=specialists)


def routes_document(routed: Routed) -> dict[str, Any]:
    """Return what `--json` prints."""
    specialists = [
        {"name": s.name, "threshold": s.threshold, "why_not": s.why_not} for s in routed.table.router.specialists
    ]
    return {
        "experts": specialists,
        "by_key": to_plain(routed.by_key),
        "by_text": to_plain(routed.by_text),
        "judged_on": routed.judged_on,
    }
