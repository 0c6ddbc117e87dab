"""The command `experts`: which domains have a specialist (an adapter of their own), which should, and why."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.database import open_database
from hivetune.base.typed import to_plain
from hivetune.cli.arguments import SetOption
from hivetune.cli.output import emit, moment, plain_progress, say, show, size, table
from hivetune.config import load_config
from hivetune.errors import UsageError
from hivetune.records import Progress
from hivetune.release.registry import releases
from hivetune.routing.domains import MIN_ROWS
from hivetune.routing.steps import SpecialistStep, newest_steps
from hivetune.run.folder import ADAPTER
from hivetune.specialists.costs import AdapterCost, known_costs
from hivetune.specialists.decide import RoutedDomain
from hivetune.specialists.routes import Routed, routes_document
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
    status: Annotated[bool, typer.Option("--status", help="Show what is known; this is the default.")] = False,
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
    told = Attended(_bar)
    made = train_specialists(settings, told) if train else propose_specialists(settings, told)
    _show(made)
    emit(_document(made))


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


def _show(made: Specialists) -> None:
    found = made.survey
    if found.kind is None:
        show("there are no domains: no agent, category, system prompt or tool divides the rows")
    else:
        sizes = {domain.label: len(found.rows_of(domain)) for domain in found.domains}
        _show_steps(made.steps, sizes)
    for step in made.changes:
        show(f"{step.specialist} {step.step}: {step.reason}")
    if made.suggested is not None:
        _show_suggested(made.suggested)
    if made.routed is not None:
        _show_routed(made.routed)
    _show_costs(made.costs.costs)
    if made.costs.problem:
        say(f"cannot measure the cost of the adapters: {made.costs.problem}")
    for problem in made.problems:
        say(problem)
    if made.routed is None and any(step.step == "born" for step in made.steps):
        show("next: train them with --train")


def _show_steps(steps: Iterable[SpecialistStep], sizes: dict[str, int]) -> None:
    rows = [
        (
            step.domain.label,
            sizes.get(step.domain.label, "-"),
            step.step.replace("-", " "),
            step.specialist,
            step.reason,
        )
        for step in steps
    ]
    table("", ("domain", "rows", "state", "specialist", "why"), rows, numeric=("rows",))


def _show_suggested(suggested: Suggestions) -> None:
    if not suggested.undeclared:
        return
    if not suggested.clusters:
        fewer = f"; {suggested.smaller} stable clusters have less than {MIN_ROWS} rows each" * bool(suggested.smaller)
        show(f"{suggested.undeclared} rows declare no domain, and their texts suggest none{fewer}")
        return
    rows = [
        (cluster.name, len(cluster.texts), ", ".join(f"{word} ({own}, {other})" for word, own, other in cluster.words))
        for cluster in suggested.clusters
    ]
    title = f"suggestions from the texts of {suggested.undeclared} rows without {suggested.key}"
    table(title, ("texts", "rows", "typical words (rows in the cluster, rows outside)"), rows, numeric=("rows",))
    show(
        "Nothing is trained on a suggestion. To make it a domain, declare "
        f'"{suggested.key}": "NAME" in its rows ({suggested.lines} lists them) and in the metadata of its requests, '
        f"and set experts.by: {suggested.key}"
    )


def _show_routed(routed: Routed) -> None:
    show(f"gain over the shared adapter in nats per token, on the test rows ({routed.judged_on}):")
    for how, domains in (("routed by declared key", routed.by_key), ("routed by text", routed.by_text)):
        if domains:
            table(how, ("domain", "rows", "gain", "95 %", "result"), [_routed_line(one) for one in domains])
    for expert in routed.table.router.specialists:
        if expert.threshold is None:
            show(f"{expert.name} is reached by name and key only: {expert.why_not}")


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


def _routed_line(one: RoutedDomain) -> tuple[object, ...]:
    interval = "-" if one.interval is None else f"{one.interval[0]:+.3f} to {one.interval[1]:+.3f}"
    said = "better" if one.better else "may be worse" if one.worse else "as good"
    return (one.domain, one.rows, f"{one.gain:+.3f}", interval, said)


def _status(shared: str) -> None:
    with closing(open_database()) as database:
        steps = newest_steps(database, shared)
        champions = {one.name: one for one in releases(database) if "champion" in one.aliases}
    problems = []
    if not steps:
        say(f"{shared} has no specialists yet; look for some: hivetune experts CONFIG --propose")
    else:
        show(f"specialists of {shared}:")
        rows = []
        for name, step in steps.items():
            serves = champions.get(name)
            held = "-"
            if serves and not serves.pruned:
                try:
                    held = size((serves.folder / ADAPTER).stat().st_size)
                except OSError as error:
                    held = "missing"
                    problems.append(
                        f"{serves.label} cannot be loaded, so {shared} answers instead: {error}. Restore the file,"
                        f" or take the release out of service: hivetune registry retire {name}"
                    )
            label = serves.label if serves else name
            rows.append((step.domain.label, step.step.replace("-", " "), label, held, moment(step.time), step.reason))
        table("", ("domain", "state", "specialist", "size", "since", "why"), rows)
    costs = known_costs(shared)
    _show_costs(costs)
    for problem in problems:
        say(problem)
    emit(
        {
            "shared": shared,
            "experts": [_step(step) for step in steps.values()],
            "costs": to_plain(costs),
            "problems": problems,
        }
    )


def _document(made: Specialists) -> dict[str, Any]:
    return {
        "shared": made.survey.shared.label,
        "by": made.survey.kind,
        "rows": len(made.survey.rows),
        "domains": [
            {"domain": domain.label, "rows": len(made.survey.rows_of(domain))} for domain in made.survey.domains
        ],
        "experts": [_step(step) for step in made.steps],
        "changes": [_step(step) for step in made.changes],
        "routes": None if made.routed is None else routes_document(made.routed),
        "costs": to_plain(made.costs.costs),
        "problems": list(made.problems),
        "suggested": None if made.suggested is None else _suggested(made.suggested),
    }


def _suggested(suggested: Suggestions) -> dict[str, Any]:
    clusters = [
        {
            "name": cluster.name,
            "rows": len(cluster.texts),
            "words": [{"word": word, "rows": own, "other_rows": other} for word, own, other in cluster.words],
            "strength": cluster.strength,
        }
        for cluster in suggested.clusters
    ]
    lines = None if suggested.lines is None else str(suggested.lines)
    return {"undeclared": suggested.undeclared, "key": suggested.key, "clusters": clusters, "lines": lines}


def _step(step: SpecialistStep) -> dict[str, Any]:
    document = to_plain(step)
    document["expert"] = document.pop("specialist")  # the key of --json
    return {**document, "domain": step.domain.label}
