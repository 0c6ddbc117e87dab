"""What a person can do here: promote, roll back, stop a run, forget. Each is confirmed on its own page, and does the
same as the command of that name."""

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, get_args

from hivetune.base.database import open_database
from hivetune.base.paths import quoted
from hivetune.dashboard.page import Page, PageRequest
from hivetune.dashboard.pages.releases import named_release
from hivetune.dashboard.pages.runs import named_run
from hivetune.dashboard.watched import Watcher
from hivetune.data.forget import ForgetKind, forget
from hivetune.errors import UsageError
from hivetune.judge.frozen import freeze_wins
from hivetune.release.registry import Release, promote, returns_to, rollback
from hivetune.run.status import ask_to_stop
from hivetune.serve.register import who

MAX_REASON_CHARS = 500


MakePage = Callable[[Watcher, PageRequest], Page]


def _ask(request: PageRequest, title: str, says: str, button: str, command: str, back: str, **more: Any) -> Page:
    """Return the page that asks for confirmation. `command`: the equal command. `reason`: whether the form has a field
    for one. `hidden`: values that the form carries."""
    values = {"says": says, "button": button, "command": command, "back": back, "reason": False, "hidden": {}}
    return Page("confirm.html", title, {**values, **more, "path": request.path})


def _result_page(title: str, lines: list[str], back: str) -> Page:
    return Page("done.html", title, {"lines": lines, "back": back})


def _page_of(release: Release) -> str:
    return f"/releases/{release.name}/{release.version}"


def _reason(request: PageRequest) -> str:
    return request.form.get("reason", "").strip()[:MAX_REASON_CHARS]


def _confirm_promotion(watcher: Watcher, request: PageRequest) -> Page:
    release = named_release(request)
    verdict = release.verdict or "not judged"
    says = f"Its verdict is: {verdict}. It becomes what {release.name} means, and what is served."
    if verdict != "deploy" or release.withdrawn:
        reason = f"was rolled back ({release.withdrawn})" if release.withdrawn else f"has the verdict {verdict}"
        says = f"It {reason}, so this is refused here; to promote it all the same, use the command with --force."
    command = f"hivetune promote {release.label}"
    return _ask(request, f"Promote {release.label}?", says, "Promote", command, _page_of(release), reason=True)


def _promote(watcher: Watcher, request: PageRequest) -> Page:
    release = named_release(request)
    with closing(open_database()) as database:
        promoted = promote(database, release.label, by=who(), reason=_reason(request))
    frozen = freeze_wins(promoted)
    lines = [f"{promoted.label} is the champion."]
    lines += [f"{frozen} of its right answers are frozen questions now."] if frozen else []
    return _result_page(f"{promoted.label} is the champion", lines, _page_of(promoted))


def _confirm_rollback(watcher: Watcher, request: PageRequest) -> Page:
    release = named_release(request)
    if "champion" not in release.aliases:
        raise UsageError(f"{release.label} is not the champion, so there is nothing to roll back")
    with closing(open_database()) as database:
        earlier = returns_to(database, release.name)
    if earlier is None:
        raise UsageError(f"there is no champion before {release.label} to return to")
    says = f"It is withdrawn, and {earlier.label} takes its place: in what the name means, and in what is served."
    command = f"hivetune rollback {release.name}"
    return _ask(request, f"Roll {release.label} back?", says, "Roll back", command, _page_of(release), reason=True)


def _roll_back(watcher: Watcher, request: PageRequest) -> Page:
    """Roll back only the champion that the page showed: another release may be champion by now."""
    release = named_release(request)
    with closing(open_database()) as database:
        champion, withdrawn = rollback(database, release.label, by=who(), reason=_reason(request))
    outcome = f"{champion.label} is the champion again; {withdrawn.label} is withdrawn"
    return _result_page(outcome, [f"{outcome}."], _page_of(champion))


def _confirm_stop(watcher: Watcher, request: PageRequest) -> Page:
    run = named_run(watcher, request)
    status = run.status()
    if status.state != "running":
        raise UsageError(f"{run.path.name} is not running")
    says = f"It is at step {status.step:,} of {status.steps:,}. It ends after a checkpoint; nothing is lost."
    command = f"hivetune stop {quoted(run.path)}"
    return _ask(request, f"Stop {run.path.name}?", says, "Stop", command, f"/runs/{request.named['run']}")


def _stop(watcher: Watcher, request: PageRequest) -> Page:
    run = named_run(watcher, request)
    if run.read.stopping:  # a second signal would end it without a checkpoint
        message = "It was asked to stop already, and ends after the step that it is in and a checkpoint."
    elif ask_to_stop(run.path):
        message = "It ends after the step that it is in and a checkpoint."
    else:
        message = "It had ended already."
    return _result_page(f"{run.path.name} was asked to stop", [message], f"/runs/{request.named['run']}")


def _confirm_forgetting(watcher: Watcher, request: PageRequest) -> Page:
    kind, value = _subject(request.query)
    says = (
        "All of it is removed from the store for good and kept out from now on. Snapshots, runs and releases that hold"
        " it are named; they are not changed."
    )
    command = f"hivetune forget --{kind} {quoted(value)}"
    hidden = {"kind": kind, "value": value}
    return _ask(request, f"Forget the {kind} {value}?", says, "Forget", command, "/data", hidden=hidden)


def _forget(watcher: Watcher, request: PageRequest) -> Page:
    kind, value = _subject(request.form)
    with closing(open_database()) as database:
        result = forget(database, kind, value)
    lines = [f"{result.interactions:,} interactions were removed, and are kept out from now on."]
    lines += [f"{result.past_wins} past wins were made of them and are removed."] if result.past_wins else []
    for taint in result.taints:
        uses = ", ".join((*taint.runs, *taint.releases)) or "nothing was made of it"
        lines.append(f"The snapshot {taint.path or taint.snapshot} holds at least {taint.rows} of its rows: {uses}.")
    lines += [f"{path}: the snapshot is gone, so its rows could not be looked at." for path in result.unchecked]
    if not result.taints:
        lines.append("No snapshot that is there holds any of it.")
    return _result_page(f"The {kind} {value} is forgotten", lines, "/data")


def _subject(fields: Mapping[str, str]) -> tuple[ForgetKind, str]:
    """Return what to forget. Raises UsageError."""
    kinds: tuple[ForgetKind, ...] = get_args(ForgetKind)
    for kind in kinds:
        if kind == fields.get("kind") and (value := fields.get("value", "").strip()):
            return kind, value
    raise UsageError("the form does not say what to forget", hint=f"choose {', '.join(kinds)}, and give its name")


# For each path the page that asks, and what the posted form does.
FORMS: Mapping[str, tuple[MakePage, MakePage]] = {
    "/runs/{run}/stop": (_confirm_stop, _stop),
    "/releases/{name}/{version:int}/promote": (_confirm_promotion, _promote),
    "/releases/{name}/{version:int}/rollback": (_confirm_rollback, _roll_back),
    "/data/forget": (_confirm_forgetting, _forget),
}
