"""Experts are trained, judged against the shared adapter on their own test rows, registered, promoted if they may."""

from collections.abc import Sequence
from contextlib import closing

from hivetune.base.database import open_database
from hivetune.base.sealed import read_sealed
from hivetune.errors import HivetuneError
from hivetune.experts.attended import ALONE, Attended
from hivetune.experts.propose import step_of
from hivetune.experts.runs import open_expert, train_expert, train_side_by_side
from hivetune.experts.survey import Survey
from hivetune.judge.evaluate_run import evaluate_run
from hivetune.judge.verdict import judge_run
from hivetune.release.registry import promote
from hivetune.routing.domains import RowDomain
from hivetune.routing.steps import ExpertStep, add_steps, expert_name
from hivetune.run.adapter import adapter_hash
from hivetune.run.folder import EVALUATION
from hivetune.serve.register import register_run
from hivetune.train.open import Run

MOVED_BY = "experts"  # who moved an alias, in its history


def make_experts(found: Survey, domains: Sequence[RowDomain], told: Attended = ALONE) -> list[ExpertStep]:
    """Those of several domains: trained side by side where there are devices, else one after the other, each judged
    before the next one is trained."""
    runs = [open_expert(found, domain, expert_name(found.shared.name, domain)) for domain in domains]
    train_side_by_side(runs, told)
    return [_make(found, domain, run, told) for domain, run in zip(domains, runs, strict=True)]


def make_expert(found: Survey, domain: RowDomain, told: Attended = ALONE) -> ExpertStep:
    """The expert of a domain that was born: trained from a copy of the shared adapter, and its step written down.

    Raises what training and evaluation raise; the same call goes on where it was.
    """
    return _make(found, domain, open_expert(found, domain, expert_name(found.shared.name, domain)), told)


def _make(found: Survey, domain: RowDomain, run: Run, told: Attended) -> ExpertStep:
    name = expert_name(found.shared.name, domain)
    told.between()
    train_expert(run, told.training(f"training {name}", len(run.plan.steps)))
    told.between()
    if not _is_evaluated(run):
        evaluate_run(run, told.bar(f"judging {name}"))
    verdict = judge_run(run)
    release, _ = register_run(run.folder, name)
    reasons = "; ".join(verdict.reasons[: verdict.decisive])
    details = {"release": release.label, "verdict": verdict.verdict, "run": str(run.folder)}
    step = step_of(found, domain, "refused", f"{verdict.verdict}: {reasons}", details)
    with closing(open_database()) as database:
        if verdict.verdict == "deploy":
            promote(database, release.label, by=MOVED_BY, reason=f"better than {found.shared.label} on {domain.label}")
            step = step_of(found, domain, "serving", f"better than {found.shared.label}: {reasons}", details)
        add_steps(database, step)
    return step


def _is_evaluated(run: Run) -> bool:
    """The test rows are asked once for an adapter."""
    path = run.folder / EVALUATION
    if not path.exists():
        return False
    try:
        return bool(read_sealed(path).get("adapter_sha256") == adapter_hash(run.folder))
    except HivetuneError:
        return False
