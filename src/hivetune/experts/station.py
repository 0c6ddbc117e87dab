"""Everything about the experts of a config in order: proposed, trained, looked at again, routed to."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from hivetune.base.database import open_database
from hivetune.base.disk import write_json
from hivetune.base.sealed import read_sealed
from hivetune.config import RunConfig
from hivetune.errors import UsageError
from hivetune.experts.costs import FamilyCosts, measure_costs
from hivetune.experts.decide import AnswerCounts, LifeStep, ScoredUnit, is_known_better, life_steps
from hivetune.experts.propose import propose_domains
from hivetune.experts.routes import Routed, Serving, adapter_folders, as_served, make_routes, serving
from hivetune.experts.runs import MOVED_BY, make_expert, make_experts
from hivetune.experts.suggest import Suggestions, suggest_domains
from hivetune.experts.survey import ALONE, Attended, Survey, scored_rows, step_of, survey
from hivetune.release.registry import Release, retire
from hivetune.routing.choose import experts_folder
from hivetune.routing.domains import RowDomain
from hivetune.routing.steps import ExpertStep, add_steps, expert_steps, newest_steps

LOOKED = "looked.json"  # below the folder of the shared release: which of its adapters was looked at, to the end


@dataclass(frozen=True)
class Experts:
    """`steps`: the newest of each domain; `changes`: what became of experts that served before; `problems`: experts
    that should serve and can't, in words; `suggested`: what a person may declare, `costs`: what their adapters cost,
    where that was looked for."""

    found: Survey
    steps: tuple[ExpertStep, ...]
    changes: tuple[ExpertStep, ...] = ()
    routed: Routed | None = None
    problems: tuple[str, ...] = ()
    suggested: Suggestions | None = None
    costs: FamilyCosts = FamilyCosts()  # noqa: RUF009 (frozen)


def not_looked_at(shared: Release) -> bool:
    """Whether the experts of this shared adapter are not decided yet."""
    try:
        looked = read_sealed(experts_folder(shared.name) / LOOKED)
    except UsageError:  # not there, or damaged: it is looked again
        return True
    return bool(looked.get("shared") != shared.adapter_sha256)


def propose_experts(config: RunConfig, told: Attended = ALONE) -> Experts:
    """Which domains would get an expert, and why; nothing that is served changes."""
    found = survey(config, told.bar("reading the rows"))
    steps = tuple(propose_domains(found, told))
    return Experts(found, steps, problems=tuple(serving(found)[1]), suggested=suggest_domains(found))


def train_experts(config: RunConfig, told: Attended = ALONE) -> Experts:
    """The experts that were born are trained and judged, those that serve are looked at again, and the router is made.

    Killed anywhere, the same call goes on. Raises what surveys, runs and evaluations raise.
    """
    found = survey(config, told.bar("reading the rows"))
    changes = review(found, told)  # before: a domain whose expert retires now may get a new one
    born = [step for step in propose_domains(found, told) if step.step == "born"]
    make_experts(found, [step.domain for step in born if step.parent == found.shared.adapter_sha256], told)
    changes += review(found, told) if born else []
    told.between()
    routed = make_routes(found, told)
    costs = measure_costs(found, told)
    write_json(found.folder.parent / LOOKED, {"schema": 1, "shared": found.shared.adapter_sha256})
    with closing(open_database()) as database:
        steps = tuple(newest_steps(database, found.shared.name).values())
    return Experts(found, steps, tuple(changes), routed, tuple(serving(found)[1]), costs=costs)


# Experts that serve are looked at again: held against a new shared adapter, made one where they are equal, retired.


def review(found: Survey, told: Attended = ALONE) -> list[ExpertStep]:
    """What became of the experts that serve, each with its reason; nothing where all stay as they are.

    An expert without test rows stays as it is: without evidence, a person decides (`serving` tells them).
    Two that are equal are retrained as one on the union of their rows; they are merged when that one serves.
    """
    experts, _ = serving(found)
    if not experts:
        return []
    with closing(open_database()) as database:
        counts = answer_counts(database, found, experts)
        look = len({step.parent for step in expert_steps(database, found.shared.name)} | {found.shared.adapter_sha256})
    units_of = {name: units for name, units in _matrix(found, experts, told).items() if units}
    steps = [*life_steps(units_of, counts, look=look)]
    done = [_retire(found, experts, step) for step in steps if step.kind == "retire"]
    gone = {name for step in steps for name in step.experts}
    for name, one in experts.items():
        if name in units_of and name not in gone and one.parent != found.shared.adapter_sha256:
            better, said = is_known_better(units_of[name], name, look=look)
            if better:
                kept = step_of(found, one.domain, "serving", f"better than the new {found.shared.label}: {said}")
                with closing(open_database()) as database:
                    add_steps(database, kept)
                done.append(kept)
            else:
                why = f"not known to be better than the new {found.shared.label}: {said}"
                done.append(_retire(found, experts, LifeStep("retire", (name,), why)))
    for step in steps:
        if step.kind == "merge":
            done += _merge(found, experts, step, told)
    return done


def answer_counts(
    database: sqlite3.Connection, found: Survey, experts: Mapping[str, Serving]
) -> dict[str, AnswerCounts]:
    """How many answers each expert's champion gave since it is served, and the whole family with it."""
    answers = dict(database.execute("SELECT release, answers FROM served").fetchall())
    labels = [found.shared.label, *(one.release.label for one in experts.values())]
    family = sum(int(answers.get(label, 0)) for label in labels)
    return {name: AnswerCounts(int(answers.get(one.release.label, 0)), family) for name, one in experts.items()}


def _matrix(found: Survey, experts: Mapping[str, Serving], told: Attended) -> dict[str, list[ScoredUnit]]:
    """expert -> test rows of its domain under base, shared and every expert, on the base as it is served."""
    base, _ = as_served(found, told.bar("preparing the base as it is served"))
    rows = [row for row in found.rows if row.split == "test"]
    units = scored_rows(
        found, adapter_folders(found, experts), rows, model=base, progress=told.bar("scoring the test rows")
    )
    return {
        name: [unit for row, unit in zip(rows, units, strict=True) if one.domain.has(row.keys)]
        for name, one in experts.items()
    }


def _retire(found: Survey, experts: Mapping[str, Serving], step: LifeStep) -> ExpertStep:
    """The step comes first: an expert whose step says that it serves, and that has no champion, would stay so for ever
    after a kill between the two."""
    (name,) = step.experts
    done = step_of(found, experts[name].domain, "retired", step.reason, {"release": experts[name].release.label})
    with closing(open_database()) as database:
        add_steps(database, done)
        retire(database, name, by=MOVED_BY, reason=step.reason)
    return done


def _merge(found: Survey, experts: Mapping[str, Serving], step: LifeStep, told: Attended) -> list[ExpertStep]:
    both = [experts[name].domain for name in step.experts]
    titles = " + ".join(domain.title for domain in both if domain.title)
    union = RowDomain(both[0].kind, tuple(value for domain in both for value in domain.values), titles)
    made = make_expert(found, union, told)
    if made.step != "serving":
        return [made]
    why = f"{step.reason}; {made.expert} was trained on the rows of both"
    done = [step_of(found, experts[name].domain, "merged", why, {"into": made.expert}) for name in step.experts]
    with closing(open_database()) as database:
        add_steps(database, *done)  # first, as in `_retire`
        for name in step.experts:
            retire(database, name, by=MOVED_BY, reason=why)
    return [made, *done]
