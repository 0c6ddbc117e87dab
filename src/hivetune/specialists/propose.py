"""Which domains need an adapter of their own: too small, nothing left to learn, or forked and decided."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import read_json, write_json
from hivetune.base.typed import to_plain
from hivetune.judge.statistics import Estimate
from hivetune.process.parent import count_items, run_task
from hivetune.process.protocol import Gradients
from hivetune.routing.domains import KeyedRow, RowDomain, too_small
from hivetune.routing.steps import SpecialistStep, add_steps, newest_steps, specialist_name
from hivetune.specialists.decide import GRADIENT_PARTS, Screen, decide_birth, screen
from hivetune.specialists.runs import FORK_STEPS, fork, remove_forks
from hivetune.specialists.survey import ALONE, Attended, Survey, scored_rows, step_of

DECIDED = "decided.json"  # written last: what it holds is in the registry
ROWS_A_PART = 16  # 128 rows of a domain: a mean gradient of 16 rows is as much signal as noise


def propose_domains(survey: Survey, attended: Attended = ALONE) -> list[SpecialistStep]:
    """Return one step for each domain, in the order of size: decided now, or before for these rows and this shared
    adapter.

    Raises what children and runs raise; what was measured until then is kept.
    """
    with closing(open_database()) as database:
        known = newest_steps(database, survey.shared.name)
    if not (survey.folder / DECIDED).exists():
        _decide(survey, known, attended)
        with closing(open_database()) as database:
            known = newest_steps(database, survey.shared.name)
    return [known[name] for domain in survey.domains if (name := specialist_name(survey.shared.name, domain)) in known]


def _serves(domain: RowDomain, known: Mapping[str, SpecialistStep]) -> bool:
    """Return whether the domain has a specialist, of its own or one of several names."""
    served = (step.domain for step in known.values() if step.step == "serving")
    return any(one.kind == domain.kind and {*domain.values} <= {*one.values} for one in served)


def _decide(survey: Survey, known: dict[str, SpecialistStep], attended: Attended) -> None:
    steps: list[SpecialistStep] = []
    waiting: list[RowDomain] = []
    for domain in survey.domains:
        if _serves(domain, known):  # its review decides about it (station.py)
            continue
        why = too_small(survey.rows_of(domain))
        if why:
            steps.append(step_of(survey, domain, "too-small", why))
        else:
            waiting.append(domain)
    screens = screened(survey, waiting, attended) if waiting else {}
    for domain in waiting:
        seen = screens[domain.slug]
        if not seen.passed:
            why = f"parts of its rows pull the shared adapter nowhere (cosine {seen.cosine:.2f}, p {seen.p:.3f})"
            why = why if seen.finite else "the gradient of the shared adapter on its rows is not finite"
            steps.append(step_of(survey, domain, "nothing-left", why, {"screen": to_plain(seen)}))
    forked = [domain for domain in waiting if screens[domain.slug].passed]
    steps += _forked(survey, forked, screens, attended)
    with closing(open_database()) as database:
        add_steps(database, *steps)
    write_json(survey.folder / DECIDED, {"schema": 1, "steps": len(steps)})
    remove_forks(survey)


def screened(survey: Survey, domains: Sequence[RowDomain], attended: Attended = ALONE) -> dict[str, Screen]:
    """Return by slug the screen of each domain: the shared adapter's gradient on parts of its rows, found or measured.
    The gradient of the shared adapter on parts of each domain's training rows, found or measured.
    """
    path = survey.folder / "screen.json"
    known = read_json(path)["products"] if path.exists() else {}
    missing = [domain for domain in domains if domain.slug not in known]
    if missing:
        attended.between()
        parts = {domain.slug: gradient_parts(survey.rows_of(domain)) for domain in missing}
        task = Gradients(
            survey.model,
            survey.shared.folder,
            survey.snapshot.folder,
            parts,
            survey.config.dtype,
            survey.config.device,
        )
        result = run_task(
            task,
            survey.folder / "screen",
            on_beat=count_items(attended.bar("screening"), len(missing) * GRADIENT_PARTS),
        )
        known = {**known, **result.check("the screen")["products"]}
        write_json(path, {"schema": 1, "products": known})
    return {domain.slug: screen(known[domain.slug]) for domain in domains}


def gradient_parts(rows: Sequence[KeyedRow]) -> tuple[tuple[int, ...], ...]:
    """Divide a domain's training rows (numbers of the snapshot) into GRADIENT_PARTS parts by the hash of their session.

    No two parts share a session.
    """
    parts: list[list[int]] = [[] for _ in range(GRADIENT_PARTS)]
    for row in sorted((row for row in rows if row.split == "train"), key=lambda row: _rank(row.id)):
        part = min(parts, key=len) if row.group == row.id else parts[_rank(row.group)[0] % GRADIENT_PARTS]
        if len(part) < ROWS_A_PART:
            part += row.numbers
    return tuple(tuple(part) for part in parts)


def _forked(
    survey: Survey, domains: Sequence[RowDomain], screens: dict[str, Screen], attended: Attended
) -> list[SpecialistStep]:
    """Judge each fork against one control: equally many steps on all rows from the same adapter."""
    if not domains:
        return []
    attended.between()
    control = fork(survey, None, attended.training("training the control", FORK_STEPS))
    steps = []
    for domain in domains:
        attended.between()
        own = fork(survey, domain, attended.training(f"training the fork of {domain.label}", FORK_STEPS))
        rows = [row for row in survey.rows_of(domain) if row.split == "validation"]
        adapters: dict[str, Path] = {"shared": survey.shared.folder, "control": control, "fork": own}
        units = scored_rows(survey, adapters, rows, progress=attended.bar("scoring the forks"))
        birth = decide_birth(units, len(domains))
        details = {
            "screen": to_plain(screens[domain.slug]),
            "rows": len(survey.rows_of(domain)),
            "gain": estimate_document(birth.gain),
            "over_shared": estimate_document(birth.over_shared),
        }
        steps.append(step_of(survey, domain, birth.answer, birth.reason, details))
    return steps


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON can hold it, with null where a number is none."""
    finite = estimate.value == estimate.value
    return {
        "value": estimate.value if finite else None,
        "interval": None if estimate.ci95 is None else list(estimate.ci95),
        "sessions": estimate.units,
    }


def _rank(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=b"screen").digest()
