"""Everything about the experts of a config in order: proposed, trained, looked at again, routed to."""

from contextlib import closing
from dataclasses import dataclass

from hivetune.base.database import open_database
from hivetune.base.disk import write_json
from hivetune.base.sealed import read_sealed
from hivetune.config import RunConfig
from hivetune.errors import UsageError
from hivetune.experts.attended import ALONE, Attended
from hivetune.experts.costs import FamilyCosts, measure_costs
from hivetune.experts.life import review
from hivetune.experts.propose import propose_domains
from hivetune.experts.routes import Routed, make_routes, serving
from hivetune.experts.suggest import Suggestions, suggest_domains
from hivetune.experts.survey import Survey, survey
from hivetune.experts.train import make_experts
from hivetune.release.registry import Release
from hivetune.routing.steps import ExpertStep, newest_steps
from hivetune.routing.table import experts_folder

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
