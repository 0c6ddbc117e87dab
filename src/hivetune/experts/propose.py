"""Which domains need an adapter of their own: too small, nothing left to learn, or forked and decided."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import read_json, write_json
from hivetune.base.typed import to_plain
from hivetune.experts.decide import GRADIENT_PARTS, Screen, decide_birth, screen
from hivetune.experts.runs import FORK_STEPS, fork, remove_forks
from hivetune.experts.survey import ALONE, Attended, Survey, scored_rows, step_of
from hivetune.judge.statistics import Estimate
from hivetune.process.parent import count_items, run_task
from hivetune.process.protocol import Gradients
from hivetune.routing.domains import ExpertRow, RowDomain, too_small
from hivetune.routing.steps import ExpertStep, add_steps, expert_name, newest_steps

DECIDED = "decided.json"  # written last: what it holds is in the registry
ROWS_A_PART = 16  # 128 rows of a domain: a mean gradient of 16 rows is as much signal as noise


def propose_domains(found: Survey, told: Attended = ALONE) -> list[ExpertStep]:
    """One step for each domain, in the order of size: decided now, or found where it was for these rows and this shared
    adapter. Raises what children and runs raise; what was measured until then is kept."""
    with closing(open_database()) as database:
        known = newest_steps(database, found.shared.name)
    if not (found.folder / DECIDED).exists():
        _decide(found, known, told)
        with closing(open_database()) as database:
            known = newest_steps(database, found.shared.name)
    return [known[name] for domain in found.domains if (name := expert_name(found.shared.name, domain)) in known]


def _serves(domain: RowDomain, known: Mapping[str, ExpertStep]) -> bool:
    """Whether the domain has an expert, of its own or one of several names."""
    served = (step.domain for step in known.values() if step.step == "serving")
    return any(one.kind == domain.kind and {*domain.values} <= {*one.values} for one in served)


def _decide(found: Survey, known: dict[str, ExpertStep], told: Attended) -> None:
    steps: list[ExpertStep] = []
    waiting: list[RowDomain] = []
    for domain in found.domains:
        if _serves(domain, known):  # what becomes of it is decided when it is looked at (life.py)
            continue
        why = too_small(found.rows_of(domain))
        if why:
            steps.append(step_of(found, domain, "too-small", why))
        else:
            waiting.append(domain)
    screens = screened(found, waiting, told) if waiting else {}
    for domain in waiting:
        seen = screens[domain.slug]
        if not seen.passed:
            why = f"parts of its rows pull the shared adapter nowhere (cosine {seen.cosine:.2f}, p {seen.p:.3f})"
            why = why if seen.finite else "the gradient of the shared adapter on its rows is not finite"
            steps.append(step_of(found, domain, "nothing-left", why, {"screen": to_plain(seen)}))
    forked = [domain for domain in waiting if screens[domain.slug].passed]
    steps += _forked(found, forked, screens, told)
    with closing(open_database()) as database:
        add_steps(database, *steps)
    write_json(found.folder / DECIDED, {"schema": 1, "steps": len(steps)})
    remove_forks(found)


def screened(found: Survey, domains: Sequence[RowDomain], told: Attended = ALONE) -> dict[str, Screen]:
    """By slug. The gradient of the shared adapter on parts of each domain's training rows, found or measured."""
    path = found.folder / "screen.json"
    known = read_json(path)["products"] if path.exists() else {}
    missing = [domain for domain in domains if domain.slug not in known]
    if missing:
        told.between()
        parts = {domain.slug: gradient_parts(found.rows_of(domain)) for domain in missing}
        task = Gradients(
            found.model,
            found.shared.folder,
            found.snapshot.folder,
            parts,
            found.config.dtype,
            found.config.device,
        )
        result = run_task(
            task, found.folder / "screen", on_beat=count_items(told.bar("screening"), len(missing) * GRADIENT_PARTS)
        )
        known = {**known, **result.check("the screen")["products"]}
        write_json(path, {"schema": 1, "products": known})
    return {domain.slug: screen(known[domain.slug]) for domain in domains}


def gradient_parts(rows: Sequence[ExpertRow]) -> tuple[tuple[int, ...], ...]:
    """PARTS groups of a domain's training rows (numbers of the snapshot) by the hash of their session, so that no two
    parts share one."""
    parts: list[list[int]] = [[] for _ in range(GRADIENT_PARTS)]
    for row in sorted((row for row in rows if row.split == "train"), key=lambda row: _rank(row.id)):
        part = min(parts, key=len) if row.group == row.id else parts[_rank(row.group)[0] % GRADIENT_PARTS]
        if len(part) < ROWS_A_PART:
            part += row.numbers
    return tuple(tuple(part) for part in parts)


def _forked(
    found: Survey, domains: Sequence[RowDomain], screens: dict[str, Screen], told: Attended
) -> list[ExpertStep]:
    """Each fork against one control: equally many steps on all rows from the same adapter."""
    if not domains:
        return []
    told.between()
    control = fork(found, None, told.training("training the control", FORK_STEPS))
    steps = []
    for domain in domains:
        told.between()
        own = fork(found, domain, told.training(f"training the fork of {domain.label}", FORK_STEPS))
        rows = [row for row in found.rows_of(domain) if row.split == "validation"]
        adapters: dict[str, Path] = {"shared": found.shared.folder, "control": control, "fork": own}
        units = scored_rows(found, adapters, rows, progress=told.bar("scoring the forks"))
        birth = decide_birth(units, len(domains))
        details = {
            "screen": to_plain(screens[domain.slug]),
            "rows": len(found.rows_of(domain)),
            "gain": estimate_document(birth.gain),
            "over_shared": estimate_document(birth.over_shared),
        }
        steps.append(step_of(found, domain, birth.answer, birth.reason, details))
    return steps


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON can hold it, where a number may be none."""
    finite = estimate.value == estimate.value
    return {
        "value": estimate.value if finite else None,
        "interval": None if estimate.ci95 is None else list(estimate.ci95),
        "sessions": estimate.units,
    }


def _rank(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=b"screen").digest()
