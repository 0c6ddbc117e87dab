"""The command `experts`: which domains have a specialist (an adapter of their own), which should, and why."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.cli.arguments import SetOption
from hivetune.cli.output import emit, moment, parts, plain_progress, say, show, size, table
from hivetune.config import load_config
from hivetune.errors import UsageError
from hivetune.records import Progress
from hivetune.release.registry import releases
from hivetune.routing.domains import MIN_ROWS
from hivetune.routing.steps import SpecialistStep, newest_steps
from hivetune.run.folder import ADAPTER
from hivetune.specialists.costs import AdapterCost, known_costs
from hivetune.specialists.decide import RoutedDomain
from hivetune.specialists.routes import routes_document
from hivetune.specialists.station import Specialists, propose_specialists, train_specialists
from hivetune.specialists.suggest import Suggestions
from hivetune.specialists.survey import Attended, shared_name


def experts(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML config; experts.shared names the release.")],
    overrides: SetOption = None,
    propose: Annotated[
        bool, typer.Option("--propose", help="Find domains that need a specialist; change nothing that is served.")
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Find, train, judge and promote specialists and their router.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Show domains, specialists and costs; the default.")] = False,
) -> None:
    """Train specialists: a domain gets its own adapter if that is measurably better, and its requests are routed to it.

    Rows declare their domain (experts.by). --propose takes minutes: it compares gradients, then trains 40 steps.
    """
    if propose + train + status > 1:
        raise UsageError("give only one of --propose, --train and --status")
    settings = load_config(Path(config), overrides or ())
    if not (propose or train):
        _status(shared_name(settings))
        return
    attended = Attended(_bar)
    outcome = train_specialists(settings, attended) if train else propose_specialists(settings, attended)
    _show(outcome)
    emit(_document(outcome))


def _bar(label: str) -> Progress:
    """Return a progress callback that prints lines; a repeated report is printed once."""
    report = plain_progress(label, "")
    last: tuple[int, int | None] = (-1, None)

    def progress(done: int, total: int | None) -> None:
        nonlocal last
        if (done, total) != last:
            report(done, total)
        last = (done, total)

    return progress


def _show(outcome: Specialists) -> None:
    survey = outcome.survey
    if survey.kind is None:
        show("there are no domains: no agent, category, system prompt or tool divides the rows")
    else:
        sizes = {domain.label: len(survey.rows_of(domain)) for domain in survey.domains}
        rows = [
            (s.domain.label, sizes.get(s.domain.label, "-"), s.step.replace("-", " "), s.specialist, s.reason)
            for s in outcome.steps
        ]
        table("", ("domain", "rows", "state", "specialist", "why"), rows, numeric=("rows",))
    for step in outcome.changes:
        show(f"{step.specialist} {step.step}: {step.reason}")
    if outcome.suggested is not None:
        _show_suggested(outcome.suggested)
    if (routed := outcome.routed) is not None:
        show(f"gain over the shared adapter in nats per token, on the test rows ({routed.judged_on}):")
        for title, domains in (("routed by declared key", routed.by_key), ("routed by text", routed.by_text)):
            if domains:
                table(title, ("domain", "rows", "gain", "95 %", "result"), [_routed_line(domain) for domain in domains])
        for expert in routed.table.router.specialists:
            if expert.threshold is None:
                show(f"{expert.name} is reached by name and key only: {expert.why_not}")
    _show_costs(outcome.costs.costs)
    if outcome.costs.problem:
        say(f"cannot measure the cost of the adapters: {outcome.costs.problem}")
    for problem in outcome.problems:
        say(problem)
    if outcome.routed is None and any(step.step == "born" for step in outcome.steps):
        show("next: train them with --train")


def _show_suggested(suggested: Suggestions) -> None:
    if not suggested.undeclared:
        return
    if not suggested.clusters:
        small = f"; {suggested.smaller} stable clusters have less than {MIN_ROWS} rows each"
        fewer = small if suggested.smaller else ""
        show(f"{suggested.undeclared} rows declare no domain, and their texts suggest none{fewer}")
        return
    rows = [
        (cluster.name, len(cluster.texts), ", ".join(f"{word} ({own}, {rest})" for word, own, rest in cluster.words))
        for cluster in suggested.clusters
    ]
    title = f"suggestions from the texts of {suggested.undeclared} rows without {suggested.key}"
    table(title, ("texts", "rows", "typical words (rows in the cluster, rows outside)"), rows, numeric=("rows",))
    show(
        "Nothing is trained on a suggestion. To make it a domain, declare "
        f'"{suggested.key}": "NAME" in its rows ({suggested.lines} lists them) and in the metadata of its requests, '
        f"and set experts.by: {suggested.key}"
    )


def _show_costs(costs: Sequence[AdapterCost]) -> None:
    """Show the cost of each adapter against the shared one."""
    if not costs:
        return
    shared = costs[1].written_per_s
    rows = [
        (
            cost.label,
            size(cost.memory_bytes) if cost.memory_bytes else "-",
            f"{cost.prompt_per_s:.0f}",
            f"{cost.written_per_s:.1f}",
            f"{cost.written_per_s / shared - 1:+.0%}" if shared else "-",
        )
        for cost in costs
    ]
    columns = ("in one llama.cpp", "memory", "prompt tokens/s", "written tokens/s", "against the shared one")
    table("", columns, rows, numeric=columns[1:])


def _routed_line(routed: RoutedDomain) -> tuple[object, ...]:
    interval = "-" if routed.interval is None else f"{routed.interval[0]:+.3f} to {routed.interval[1]:+.3f}"
    result = "better" if routed.better else "may be worse" if routed.worse else "as good"
    return (routed.domain, routed.rows, f"{routed.gain:+.3f}", interval, result)


def _status(shared: str) -> None:
    with closing(open_database()) as database:
        steps = newest_steps(database, shared)
        champions = {release.name: release for release in releases(database) if "champion" in release.aliases}
    problems = []
    if not steps:
        say(f"{shared} has no specialists yet; look for some: hivetune experts CONFIG --propose")
    else:
        show(f"specialists of {shared}:")
        rows = []
        for name, step in steps.items():
            serves = champions.get(name)
            stored = "-"
            if serves and not serves.pruned:
                try:
                    stored = size((serves.folder / ADAPTER).stat().st_size)
                except OSError as error:
                    stored = "missing"
                    problems.append(
                        f"{serves.label} cannot be loaded, so {shared} answers instead: {error}. Restore the file,"
                        f" or take the release out of service: hivetune registry retire {name}"
                    )
            label = serves.label if serves else name
            rows.append((step.domain.label, step.step.replace("-", " "), label, stored, moment(step.time), step.reason))
        table("", ("domain", "state", "specialist", "size", "since", "why"), rows)
    costs = known_costs(shared)
    _show_costs(costs)
    for problem in problems:
        say(problem)
    experts = [_step(step) for step in steps.values()]
    emit({"shared": shared, "experts": experts, "costs": costs, "problems": problems})


def _document(outcome: Specialists) -> dict[str, Any]:
    return {
        "shared": outcome.survey.shared.label,
        "by": outcome.survey.kind,
        "rows": len(outcome.survey.rows),
        "domains": [
            {"domain": domain.label, "rows": len(outcome.survey.rows_of(domain))} for domain in outcome.survey.domains
        ],
        "experts": [_step(step) for step in outcome.steps],
        "changes": [_step(step) for step in outcome.changes],
        "routes": None if outcome.routed is None else routes_document(outcome.routed),
        "costs": outcome.costs.costs,
        "problems": outcome.problems,
        "suggested": None if outcome.suggested is None else _suggested(outcome.suggested),
    }


def _suggested(suggested: Suggestions) -> dict[str, Any]:
    clusters = [
        {
            "name": cluster.name,
            "rows": len(cluster.texts),
            "words": [{"word": word, "rows": own, "other_rows": rest} for word, own, rest in cluster.words],
            "strength": cluster.strength,
        }
        for cluster in suggested.clusters
    ]
    return {**parts(suggested, "undeclared", "key"), "clusters": clusters, "lines": suggested.lines}


def _step(step: SpecialistStep) -> dict[str, Any]:
    # `expert` is the key that --json always had.
    return {
        **parts(step, "shared", "step", "reason", "parent", "details", "time"),
        "domain": step.domain.label,
        "expert": step.specialist,
    }
