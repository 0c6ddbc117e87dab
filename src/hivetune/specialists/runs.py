"""Which domains need an adapter of their own, decided by forks of a few steps; and the runs that make it."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import read_json, write_json
from hivetune.base.journal import read_journal
from hivetune.base.sealed import read_sealed
from hivetune.base.typed import to_plain
from hivetune.config import RunConfig
from hivetune.data.fates import write_leave_out
from hivetune.errors import HivetuneError, Stopped
from hivetune.judge.compare import evaluate_run
from hivetune.judge.gate import judge_run
from hivetune.judge.statistics import Estimate
from hivetune.machine.inventory import read_machine
from hivetune.process.parent import count_items, run_task
from hivetune.process.protocol import Gradients
from hivetune.release.prune import remove_run
from hivetune.release.registry import promote, releases
from hivetune.routing.domains import KeyedRow, RowDomain, too_small
from hivetune.routing.steps import SpecialistStep, add_steps, newest_steps, specialist_name
from hivetune.run.folder import EVALUATION, EVENTS, adapter_hash, read_resolved, write_resolved
from hivetune.run.status import has_begun, run_status
from hivetune.serve.register import register_run
from hivetune.specialists.decide import GRADIENT_PARTS, Birth, Screen, decide_birth, screen
from hivetune.specialists.survey import ALONE, Attended, Survey, scored_parts, step_of
from hivetune.train.open import Run
from hivetune.train.probe import probe_run
from hivetune.train.queue import Going, failure_text, run_queue, slots_of
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms

FORK_STEPS = 40
# Of the rate that the shared adapter was trained with: it is near its optimum, and a large step away from it forgets.
RATE = 0.5
# Share of an expert's training tokens that are other domains': 10 to 20 % keep what a copy would forget.
REPLAY = 0.15
RUNS = "runs"  # of experts, below the folder of their shared release
MOVED_BY = "experts"  # who moved an alias, in its history
DECIDED = "decided.json"  # written last: what it holds is in the registry
ROWS_A_PART = 16  # 128 rows of a domain: a mean gradient of 16 rows is as much signal as noise


def propose_domains(survey: Survey, attended: Attended = ALONE) -> list[SpecialistStep]:
    """Return one step for each domain, in the order of size: decided now, or before for these rows and this shared
    adapter.

    Raises the errors of children and runs; the measurements made until then are kept.
    """
    with closing(open_database()) as database:
        steps = newest_steps(database, survey.shared.name)
    if not (survey.folder / DECIDED).exists():
        _decide(survey, steps, attended)
        with closing(open_database()) as database:
            steps = newest_steps(database, survey.shared.name)
    return [steps[name] for domain in survey.domains if (name := specialist_name(survey.shared.name, domain)) in steps]


def _serves(domain: RowDomain, steps: Mapping[str, SpecialistStep]) -> bool:
    """Return whether the domain has a specialist, of its own or one of several names."""
    served = (step.domain for step in steps.values() if step.step == "serving")
    return any(d.kind == domain.kind and {*domain.values} <= {*d.values} for d in served)


def _taken(survey: Survey, name: str) -> str:
    """Return why a name can't be a specialist's: a release of another run has it, and would get another champion."""
    with closing(open_database()) as database:
        runs = [Path(release.run) for release in releases(database, name)]
    own = (survey.folder.parent / RUNS).parts[-3:]  # below the home, which may have moved
    other = next((run for run in runs if run.parent.parts[-3:] != own), None)
    return "" if other is None else f"{name} is the name of releases from another run ({other})"


def _decide(survey: Survey, steps_by_name: dict[str, SpecialistStep], attended: Attended) -> None:
    steps: list[SpecialistStep] = []
    waiting: list[RowDomain] = []
    for domain in survey.domains:
        if _serves(domain, steps_by_name):  # its review decides about it (station.py)
            continue
        taken = _taken(survey, specialist_name(survey.shared.name, domain))
        reason = too_small(survey.rows_of(domain))
        if taken:
            steps.append(step_of(survey, domain, "not-born", taken))
        elif reason:
            steps.append(step_of(survey, domain, "too-small", reason))
        else:
            waiting.append(domain)
    screens = screened(survey, waiting, attended) if waiting else {}
    for domain in waiting:
        result = screens[domain.slug]
        if not result.passed:
            reason = f"parts of its rows pull the shared adapter nowhere (cosine {result.cosine:.2f}, p {result.p:.3f})"
            reason = reason if result.finite else "the gradient of the shared adapter on its rows is not finite"
            steps.append(step_of(survey, domain, "nothing-left", reason, {"screen": to_plain(result)}))
    steps += _forked(survey, [domain for domain in waiting if screens[domain.slug].passed], screens, attended)
    with closing(open_database()) as database:
        add_steps(database, *steps)
    write_json(survey.folder / DECIDED, {"schema": 1, "steps": len(steps)})
    remove_forks(survey)


def screened(survey: Survey, domains: Sequence[RowDomain], attended: Attended = ALONE) -> dict[str, Screen]:
    """Return by slug the screen of each domain, found or measured, from the gradient on parts of its rows."""
    path = survey.folder / "screen.json"
    products = read_json(path)["products"] if path.exists() else {}
    missing = [domain for domain in domains if domain.slug not in products]
    if missing:
        attended.between()
        task = Gradients(
            survey.model,
            survey.shared.folder,
            survey.snapshot.folder,
            {domain.slug: gradient_parts(survey.rows_of(domain)) for domain in missing},
            survey.config.dtype,
            survey.config.device,
        )
        result = run_task(
            task,
            survey.folder / "screen",
            on_beat=count_items(attended.bar("screening"), len(missing) * GRADIENT_PARTS),
        )
        products = {**products, **result.check("the screen")["products"]}
        write_json(path, {"schema": 1, "products": products})
    return {domain.slug: screen(products[domain.slug]) for domain in domains}


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
    parts = []
    for domain in domains:
        attended.between()
        fork_folder = fork(survey, domain, attended.training(f"training the fork of {domain.label}", FORK_STEPS))
        rows = [row for row in survey.rows_of(domain) if row.split == "validation"]
        parts.append(({"shared": survey.shared.folder, "control": control, "fork": fork_folder}, rows))
    attended.between()
    units_of = scored_parts(survey, parts, progress=attended.bar("scoring the forks"))
    steps = []
    for domain, units in zip(domains, units_of, strict=True):
        details = {"screen": to_plain(screens[domain.slug]), "rows": len(survey.rows_of(domain))}
        steps.append(birth_step(survey, domain, decide_birth(units, len(domains)), details))
    return steps


def birth_step(survey: Survey, domain: RowDomain, birth: Birth, details: Mapping[str, Any]) -> SpecialistStep:
    """Return the step of a domain whose fork was judged."""
    numbers = {"gain": estimate_document(birth.gain), "over_shared": estimate_document(birth.over_shared)}
    about = {**details, **numbers, "still_gains": birth.still_gains}
    return step_of(survey, domain, birth.answer, birth.reason, about)


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


# Runs that go on from the shared adapter: forks of a few steps, and specialists from training to promotion.


def make_specialists(survey: Survey, domains: Sequence[RowDomain], attended: Attended = ALONE) -> list[SpecialistStep]:
    """Make the specialists of several domains.

    They are trained side by side where there are devices. Else each is judged before the next one is trained.
    """
    runs = [open_specialist(survey, domain, specialist_name(survey.shared.name, domain)) for domain in domains]
    train_side_by_side(runs, attended)
    return [_make(survey, domain, run, attended) for domain, run in zip(domains, runs, strict=True)]


def make_specialist(survey: Survey, domain: RowDomain, attended: Attended = ALONE) -> SpecialistStep:
    """Train the specialist of a domain, from a copy of the shared adapter, and record its step.

    Raises what training and evaluation raise; the same call continues where it was.
    """
    return _make(survey, domain, open_specialist(survey, domain, specialist_name(survey.shared.name, domain)), attended)


def _make(survey: Survey, domain: RowDomain, run: Run, attended: Attended) -> SpecialistStep:
    name = specialist_name(survey.shared.name, domain)
    attended.between()
    train_specialist(run, attended.training(f"training {name}", len(run.plan.steps)))
    attended.between()
    if not _is_evaluated(run):
        evaluate_run(run, attended.bar(f"judging {name}"))
    verdict = judge_run(run)
    release, _ = register_run(run.folder, name)
    with closing(open_database()) as database:
        born = newest_steps(database, survey.shared.name).get(name)
    remarks = [born.details["still_gains"]] if born is not None and born.details.get("still_gains") else []
    reasons = "; ".join((*verdict.reasons[: verdict.decisive], *remarks))
    details = {"release": release.label, "verdict": verdict.verdict, "run": str(run.folder)}
    step = step_of(survey, domain, "refused", f"{verdict.verdict}: {reasons}", details)
    with closing(open_database()) as database:
        if verdict.verdict == "deploy":
            promote(database, release.label, by=MOVED_BY, reason=f"better than {survey.shared.label} on {domain.label}")
            step = step_of(survey, domain, "serving", f"better than {survey.shared.label}: {reasons}", details)
        add_steps(database, step)
    return step


def _is_evaluated(run: Run) -> bool:
    """Return whether the run's evaluation is of its present adapter: test rows are asked once for an adapter."""
    path = run.folder / EVALUATION
    if not path.exists():
        return False
    try:
        return bool(read_sealed(path).get("adapter_sha256") == adapter_hash(run.folder))
    except HivetuneError:
        return False


def fork(survey: Survey, domain: RowDomain | None, terms: Terms = Terms()) -> Path:
    """Train FORK_STEPS steps from the shared adapter on the rows of `domain`, or on all for None; return the run's
    folder.

    Nothing is chosen by the validation rows, which decide about the fork afterwards: the last step's adapter counts.
    """
    rows = list(survey.rows) if domain is None else survey.rows_of(domain)
    label = "control" if domain is None else domain.slug
    trained = sum(row.split == "train" for row in rows)
    steps = {
        "max_steps": FORK_STEPS,
        "epochs": float(math.ceil(FORK_STEPS * survey.config.batch_size / max(1, trained)) + 1),
        "validate_every": FORK_STEPS,
        "patience": None,
    }
    config = going_on(survey, {row.id for row in rows}, survey.folder / f"fork-{label}").model_copy(update=steps)
    run = open_run(config, f"{survey.shared.name}-fork-{label}")
    inherit_choices(survey, run)
    train_run(run, terms)
    return run.folder


def remove_forks(survey: Survey) -> None:
    """Remove the forks, which have been judged; their measurements stay."""
    for folder in sorted(survey.folder.glob("fork-*")):
        if folder.is_dir():
            with closing(open_database()) as database:
                remove_run(database, folder)
        else:
            folder.unlink()  # what it left out


def open_specialist(survey: Survey, domain: RowDomain, name: str) -> Run:
    """Open the run of a specialist: its domain's rows, and REPLAY of the others' among its training rows."""
    own_rows = survey.rows_of(domain)
    chosen = {row.id for row in own_rows} | replayed(survey, own_rows)
    config = going_on(survey, chosen, survey.folder.parent / RUNS / f"{name}-{survey.folder.name}")
    settings = config.eval.model_copy(update={"baseline": survey.shared.label})
    share = sum(row.split == "train" for row in own_rows) / max(1, sum(row.split == "train" for row in survey.rows))
    steps = None if config.max_steps is None else max(FORK_STEPS, math.ceil(config.max_steps * share))
    run = open_run(config.model_copy(update={"eval": settings, "max_steps": steps}), name)
    inherit_choices(survey, run)
    return run


def inherit_choices(survey: Survey, run: Run) -> None:
    """Give a new run the measurements of the shared adapter, if it was trained on this machine.

    The run has the same model, shapes and kind of adapter. To measure again costs as much processor time as a short
    training.
    """
    events = Path(survey.shared.run) / EVENTS
    machines = [e["fingerprint"] for e in read_journal(events) if e["event"] == "supervisor_started"]
    if has_begun(run.folder) or not machines or machines[-1] != read_machine(folder=run.folder).fingerprint:
        return
    write_resolved(run.folder, run.config, replace(read_resolved(survey.shared.folder)[1], prediction=None))


def train_specialist(run: Run, terms: Terms = Terms()) -> None:
    """Train a run to its end; a finished one is left as it is."""
    if read_resolved(run.folder)[1].dtype is None:  # nothing was inherited
        probe_run(run)
    train_run(run, terms)


def train_side_by_side(runs: Sequence[Run], attended: Attended) -> None:
    """Train unfinished runs to their ends, one device each; do nothing where there is only one device.

    Raises HivetuneError naming those that failed, when the others are done; Stopped when `attended` asks for an end.
    """
    waiting = [run for run in runs if not run.is_finished]
    if len(waiting) < 2 or not attended.side_by_side:
        return
    slots = slots_of(waiting[0].config, read_machine(folder=waiting[0].folder))
    if len(slots) < 2:
        return
    attended.between()
    report = attended.training(f"training {len(waiting)} experts", sum(len(run.plan.steps) for run in waiting))

    def look() -> None:
        report.on_step(sum(run_status(run.folder).step for run in waiting))
        if report.ends():
            raise Stopped(
                "the training of specialists was stopped", hint="the same command continues", signal_number=None
            )

    codes = run_queue([Going(run.folder) for run in waiting], slots, look)
    failed = [
        f"{run.record['name']}: {failure_text(run.folder, code)}" for run in waiting if (code := codes[run.folder])
    ]
    if failed:
        raise HivetuneError("; ".join(failed), hint="the same command continues; see the log: hivetune logs RUN")


def going_on(survey: Survey, chosen: Collection[str], folder: Path) -> RunConfig:
    """Return the config of a run on the rows `chosen` (ids) from a copy of the shared adapter, at RATE of its rate."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    leave_out = folder.with_name(f"{folder.name}.leave_out.jsonl")
    write_leave_out(leave_out, {row.id: "other-domain" for row in survey.rows if row.id not in chosen})
    rate = read_resolved(survey.shared.folder)[0].learning_rate
    return survey.config.model_copy(
        update={
            "data": survey.config.data.model_copy(update={"leave_out": str(leave_out)}),
            "lora": survey.config.lora.model_copy(update={"start": str(survey.shared.folder)}),
            "learning_rate": RATE * rate,
            "output": str(folder),
        }
    )


def replayed(survey: Survey, own_rows: Sequence[KeyedRow]) -> set[str]:
    """Return ids of other domains' training rows, with REPLAY of all trained tokens.

    They are drawn by their hashes, so that the same rows are drawn again, and each domain by its size. No row of
    validation or test is drawn: the specialist is judged on its own.
    """
    mine = {row.id for row in own_rows}

    def tokens(row: KeyedRow) -> int:
        return sum(survey.snapshot.length(number) for number in row.numbers)

    tokens_left = REPLAY / (1 - REPLAY) * sum(tokens(row) for row in own_rows if row.split == "train")
    chosen: set[str] = set()
    others = [row for row in survey.rows if row.split == "train" and row.id not in mine]
    for row in sorted(others, key=lambda row: blake2b(row.id.encode(), digest_size=8, key=b"replay").digest()):
        if tokens_left <= 0:
            break
        chosen.add(row.id)
        tokens_left -= tokens(row)
    return chosen
