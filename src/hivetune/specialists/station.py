"""All about the specialists of a config in order: reviewed, proposed, trained, routed to."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from hivetune.base.database import open_database
from hivetune.config import RunConfig
from hivetune.process.forkserver import forking
from hivetune.release.registry import retire
from hivetune.routing.choose import note_looked_at
from hivetune.routing.domains import RowDomain
from hivetune.routing.steps import SpecialistStep, add_steps, newest_steps, specialist_steps
from hivetune.specialists.costs import FamilyCosts, measure_costs
from hivetune.specialists.decide import AnswerCounts, LifeStep, ScoredUnit, is_known_better, life_steps
from hivetune.specialists.routes import Routed, adapter_folders, as_served, make_routes
from hivetune.specialists.runs import MOVED_BY, make_specialist, make_specialists, propose_domains
from hivetune.specialists.suggest import Suggestions, suggest_domains
from hivetune.specialists.survey import ALONE, Attended, Serving, Survey, read_survey, scored_rows, serving, step_of


@dataclass(frozen=True)
class Specialists:
    """The specialists of a config. `steps`: the newest of each domain. `changes`: the outcome of earlier specialists.

    `problems`: specialists that should serve and can't, in words. `suggested`: what a person may declare. `costs`: what
    their adapters cost, where that was measured.
    """

    survey: Survey
    steps: tuple[SpecialistStep, ...]
    changes: tuple[SpecialistStep, ...] = ()
    routed: Routed | None = None
    problems: tuple[str, ...] = ()
    suggested: Suggestions | None = None
    costs: FamilyCosts = FamilyCosts()  # noqa: RUF009 (frozen)


def propose_specialists(config: RunConfig, attended: Attended = ALONE) -> Specialists:
    """Decide which domains would get a specialist, and why; nothing that is served changes."""
    survey = read_survey(config, attended.bar("reading the rows"))
    with forking():
        steps = tuple(propose_domains(survey, attended))
    return Specialists(survey, steps, problems=tuple(serving(survey)[1]), suggested=suggest_domains(survey))


def train_specialists(config: RunConfig, attended: Attended = ALONE) -> Specialists:
    """Review the specialists that serve, train and judge new ones, and make the router.

    Killed anywhere, the same call continues. Raises the errors of surveys, runs and evaluations.
    """
    survey = read_survey(config, attended.bar("reading the rows"))
    with forking():
        changes = review(survey, attended)  # before: a domain whose expert retires now may get a new one
        born = [step for step in propose_domains(survey, attended) if step.step == "born"]
        due = [step.domain for step in born if step.parent == survey.shared.adapter_sha256]
        make_specialists(survey, due, attended)
        changes += review(survey, attended) if born else []
        attended.between()
        routed = make_routes(survey, attended)
    costs = measure_costs(survey, attended)
    note_looked_at(survey.shared)
    with closing(open_database()) as database:
        steps = tuple(newest_steps(database, survey.shared.name).values())
    return Specialists(survey, steps, tuple(changes), routed, tuple(serving(survey)[1]), costs=costs)


# Specialists that serve are reviewed: compared with a new shared adapter, merged where equal, retired.


def review(survey: Survey, attended: Attended = ALONE) -> list[SpecialistStep]:
    """Return the outcome of the specialists that serve, each with its reason; nothing where all stay as they are.

    They are compared with a new shared adapter, merged where two are equal, or retired. A specialist without test rows
    stays as it is: without evidence, a person decides (`serving` reports it). Two that are equal are trained again as
    one on the union of their rows; they are merged when that one serves.
    """
    specialists, _ = serving(survey)
    if not specialists:
        return []
    with closing(open_database()) as database:
        counts = answer_counts(database, survey, specialists)
        look = len(
            {step.parent for step in specialist_steps(database, survey.shared.name)} | {survey.shared.adapter_sha256}
        )
    units_of = {name: units for name, units in _matrix(survey, specialists, attended).items() if units}
    steps = [*life_steps(units_of, counts, look=look)]
    reviewed = [_retire(survey, specialists, step) for step in steps if step.kind == "retire"]
    ended = {name for step in steps for name in step.specialists}
    for name, s in specialists.items():
        if name in units_of and name not in ended and s.parent != survey.shared.adapter_sha256:
            better, fact = is_known_better(units_of[name], name, look=look)
            if better:
                kept_step = step_of(survey, s.domain, "serving", f"better than the new {survey.shared.label}: {fact}")
                with closing(open_database()) as database:
                    add_steps(database, kept_step)
                reviewed.append(kept_step)
            else:
                reason = f"not known to be better than the new {survey.shared.label}: {fact}"
                reviewed.append(_retire(survey, specialists, LifeStep("retire", (name,), reason)))
    for step in steps:
        if step.kind == "merge":
            reviewed += _merge(survey, specialists, step, attended)
    return reviewed


def answer_counts(
    database: sqlite3.Connection, survey: Survey, specialists: Mapping[str, Serving]
) -> dict[str, AnswerCounts]:
    """Return the number of answers of each specialist's champion since it is served, and of the whole family."""
    answers = dict(database.execute("SELECT release, answers FROM served").fetchall())
    labels = [survey.shared.label, *(s.release.label for s in specialists.values())]
    family = sum(int(answers.get(label, 0)) for label in labels)
    return {name: AnswerCounts(int(answers.get(s.release.label, 0)), family) for name, s in specialists.items()}


def _matrix(survey: Survey, specialists: Mapping[str, Serving], attended: Attended) -> dict[str, list[ScoredUnit]]:
    """Return specialist -> test rows of its domain under shared and every specialist, on the base as it is served."""
    base, _ = as_served(survey, attended.bar("preparing the base as it is served"))
    rows = [row for row in survey.rows if row.split == "test"]
    units = scored_rows(
        survey, adapter_folders(survey, specialists), rows, model=base, progress=attended.bar("scoring the test rows")
    )
    return {
        name: [unit for row, unit in zip(rows, units, strict=True) if s.domain.has(row.keys)]
        for name, s in specialists.items()
    }


def _retire(survey: Survey, specialists: Mapping[str, Serving], step: LifeStep) -> SpecialistStep:
    """Retire a specialist.

    The step comes first: else a kill between the two would leave a step that says it serves, without a champion, for
    ever.
    """
    (name,) = step.specialists
    retired = step_of(
        survey, specialists[name].domain, "retired", step.reason, {"release": specialists[name].release.label}
    )
    with closing(open_database()) as database:
        add_steps(database, retired)
        retire(database, name, by=MOVED_BY, reason=step.reason)
    return retired


def _merge(
    survey: Survey, specialists: Mapping[str, Serving], step: LifeStep, attended: Attended
) -> list[SpecialistStep]:
    domains = [specialists[name].domain for name in step.specialists]
    titles = " + ".join(domain.title for domain in domains if domain.title)
    union = RowDomain(domains[0].kind, tuple(value for domain in domains for value in domain.values), titles)
    specialist = make_specialist(survey, union, attended)
    if specialist.step != "serving":
        return [specialist]
    reason = f"{step.reason}; {specialist.specialist} was trained on the rows of both"
    merged = [
        step_of(survey, specialists[name].domain, "merged", reason, {"into": specialist.specialist})
        for name in step.specialists
    ]
    with closing(open_database()) as database:
        add_steps(database, *merged)  # first, as in `_retire`
        for name in step.specialists:
            retire(database, name, by=MOVED_BY, reason=reason)
    return [specialist, *merged]
