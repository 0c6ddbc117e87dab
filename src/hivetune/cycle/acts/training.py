"""Acts on the run: a slice of training, the evaluation, the verdict; and the training of specialists."""

import time
from collections import Counter
from contextlib import closing

from hivetune.base.database import open_database
from hivetune.base.sealed import write_sealed
from hivetune.base.units import number
from hivetune.cycle.acts.context import ActContext, Slice, SliceEnded, ends_with_window
from hivetune.cycle.gate import Comparisons, judge_cycle
from hivetune.cycle.ledger import AGAINST_BEST, AGAINST_CHAMPION, GATE
from hivetune.cycle.observe import is_evaluation_of, looks_at, rivals_of
from hivetune.cycle.pool import rows_behind
from hivetune.errors import Stopped
from hivetune.judge.compare import compare_pair
from hivetune.judge.evaluate import evaluate_run
from hivetune.judge.gate import read_evaluation, verdict_document
from hivetune.run.folder import EVALUATION, adapter_hash
from hivetune.specialists.station import train_specialists
from hivetune.specialists.survey import Attended
from hivetune.train.open import Run
from hivetune.train.probe import probe_run, proof_is_due, prove_again
from hivetune.train.start import train_run


def train_slice(context: ActContext) -> str:
    """Train one slice of the cycle's run."""
    settings, opened = context.config.cycle, context.observed.open
    assert opened is not None
    return slice_of(
        context, context.run(), None if settings.budget_kwh is None else settings.budget_kwh - opened.spent_kwh
    )


def slice_of(context: ActContext, run: Run, left_kwh: float | None = None) -> str:
    """Train one slice. The worker holds the card's lease as long as it lives; the kernel returns it."""
    slice_ = Slice(context.allowed, context.config.cycle.yield_to == "serving", left_kwh)
    total = len(run.plan.steps)
    if proof_is_due(run):
        prove_again(run, context.progress("proving again that this machine computes right"))
    probe_run(run, context.progress("measuring this machine"))
    report = context.progress("training")
    slice_.on_step = lambda step: report(step, total)
    started = time.monotonic()
    try:
        document = train_run(run, slice_.terms())
    except Stopped as error:
        if error.signal_number is not None:
            raise
        raise SliceEnded(f"{slice_.why}: {error.message}") from None
    finally:
        hours = (time.monotonic() - started) / 3600
        context.details |= {"hours": round(hours, 6), "kwh": round(slice_.energy.kwh, 6)}
        context.details["energy"] = "measured" if slice_.energy.measured else "estimated"
    return f"{document['steps']} steps, loss {number(document['loss_last'])}"


def evaluate_beside(context: ActContext) -> str:
    """Evaluate the run against the base on its held-out rows, and against the champion and the best ever on the same
    rows."""
    cycle, run = context.cycle(), context.run()
    report = ends_with_window(context, "scoring and answering")
    evaluate_run(run, report)
    with closing(open_database()) as database:
        rivals = rivals_of(database, context.name)
    for rival, file in ((rivals.champion, AGAINST_CHAMPION), (rivals.best, AGAINST_BEST)):
        if rival is None or is_evaluation_of(cycle.folder / file, adapter_hash(run.folder), rival):
            continue
        result = compare_pair(rival.label, str(run.folder), run.config.eval, run=run, progress=report)
        facts = {"adapter_sha256": adapter_hash(run.folder), "rival": rival.label}
        write_sealed(cycle.folder / file, {**result.document, **facts})
    return f"measured against {', '.join(('the base', *rivals.labels))}"


def judge_candidate(context: ActContext) -> str:
    """Judge the evaluations against base, champion and best ever. Another champion needs another verdict."""
    cycle, run = context.cycle(), context.run()
    with closing(open_database()) as database:
        rivals = rivals_of(database, context.name)
        earlier = rows_behind(database, rivals.champion) if rivals.champion is not None else frozenset()
        looks = looks_at(database, context.name, rivals)
    contests = Comparisons(
        base=read_evaluation(run.folder / EVALUATION),
        champion=read_evaluation(cycle.folder / AGAINST_CHAMPION) if rivals.champion is not None else None,
        best=read_evaluation(cycle.folder / AGAINST_BEST) if rivals.best is not None else None,
        known=earlier,
        look=1 + looks,
    )
    verdict = judge_cycle(contests, run.config.gate)
    passed, reasons, decisive = verdict.passed, list(verdict.reasons), verdict.decisive
    if cycle.opened_for == "rebuild" and not passed:
        # What was forgotten must go: a model without it need not be better than one with it, only no failure.
        passed = verdict.parts["base"].verdict == "deploy" and verdict.verdict != "abort"
        reasons, decisive = ["the champion holds forgotten rows", *reasons], decisive + 1
    document = {
        "schema": 1,
        "passed": passed,
        "verdict": verdict.verdict,
        "reasons": reasons,
        "decisive": decisive,
        "rivals": list(rivals.labels),
        "adapter_sha256": adapter_hash(run.folder),
        "look": verdict.look,
        "becomes_best": verdict.becomes_best,
        "fresh_rows": verdict.fresh_rows,
        "kl_to_base": verdict.kl_to_base,
        "parts": {rival: verdict_document(part) for rival, part in verdict.parts.items()},
    }
    write_sealed(cycle.folder / GATE, document)
    return f"{verdict.verdict}: {'; '.join(reasons[:decisive])}"


def look_for_experts(context: ActContext) -> str:
    """Look for specialists as `hivetune experts CONFIG --train` does, within the window. Finished work is kept when it
    ends."""
    slice_ = Slice(context.allowed, context.config.cycle.yield_to == "serving")

    def between() -> None:
        allowed = context.allowed()
        if not allowed.now:
            raise SliceEnded(f"the window ended first: {allowed.reason}")

    try:
        report = train_specialists(
            context.config, Attended(context.progress, slice_.terms(), between, not slice_.yields)
        )
    except Stopped as error:
        if error.signal_number is not None:
            raise
        raise SliceEnded(f"{slice_.why}: {error.message}") from None
    counts = Counter(step.step for step in report.steps)
    context.details["experts"] = dict(counts)
    steps = ", ".join(f"{count} {step}" for step, count in counts.items()) or "the rows have no domains"
    return "; ".join((steps, *report.problems))
