"""The actions on the dashboard: promote, roll back, stop a run, forget. Each has a page that asks for confirmation; its
form does the same as the command of that name."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, get_args

from hivetune.base.database import open_database
from hivetune.base.paths import quoted
from hivetune.base.units import count
from hivetune.dashboard.page import MakePage, Page, PageRequest
from hivetune.dashboard.pages import named_release, named_run
from hivetune.dashboard.watched import Watcher
from hivetune.data.forget import ForgetKind, forget
from hivetune.errors import UsageError
from hivetune.judge.rows import freeze_wins
from hivetune.release.registry import promote, rollback, rollback_target, who
from hivetune.run.status import ask_to_stop

MAX_REASON_CHARS = 500  # a sentence or two in the history


def _ask(request: PageRequest, title: str, says: str, button: str, command: str, back: str, **more: Any) -> Page:
    """Return the page that asks for confirmation. `command`: the equivalent command. `reason`: whether the form has a
    field for a reason. `hidden`: values that the form carries along.
    """
    values = {"says": says, "button": button, "command": command, "back": back, "reason": False, "hidden": {}, **more}
    return Page("confirm.html", title, {**values, "path": request.path})


def _done(title: str, lines: Sequence[str], back: str) -> Page:
    return Page("message.html", title, {"lines": lines, "back": back})


def _reason(form: Mapping[str, str]) -> str:
    return form.get("reason", "").strip()[:MAX_REASON_CHARS]


def promotion(watcher: Watcher, request: PageRequest) -> Page:
    release = named_release(request)
    back = f"/releases/{release.name}/{release.version}"
    if request.form is not None:
        with closing(open_database()) as database:
            promoted = promote(database, release.label, by=who(), reason=_reason(request.form))
        frozen = freeze_wins(promoted)  # small losses would add up from release to release otherwise
        lines = [f"{frozen} of its right answers are frozen questions now."] if frozen else []
        return _done(f"{promoted.label} is the champion", lines, back)
    says = f"Its verdict is: {release.verdict}. It becomes what {release.name} means, and what is served."
    if release.verdict != "deploy" or release.withdrawn:
        why = f"was rolled back ({release.withdrawn})" if release.withdrawn else f"has the verdict {release.verdict}"
        says = f"It {why}, so this is refused here; to promote it all the same, use the command with --force."
    command = f"hivetune promote {release.label}"
    return _ask(request, f"Promote {release.label}?", says, "Promote", command, back, reason=True)


def rolling_back(watcher: Watcher, request: PageRequest) -> Page:
    # The release that the page showed, not NAME: another one may be champion by now.
    release = named_release(request)
    back = f"/releases/{release.name}/{release.version}"
    with closing(open_database()) as database:
        earlier = rollback_target(database, release.name)
        if "champion" not in release.aliases:
            raise UsageError(f"{release.label} is not the champion, so it can't be rolled back")
        if earlier is None:
            raise UsageError(f"there is no champion before {release.label} to return to")
        if request.form is not None:
            rollback(database, release.label, by=who(), reason=_reason(request.form))
            return _done(f"{earlier.label} is the champion again", [f"{release.label} is withdrawn."], back)
    says = f"It is withdrawn, and {earlier.label} takes its place: in what the name means, and in what is served."
    command = f"hivetune rollback {release.name}"
    return _ask(request, f"Roll {release.label} back?", says, "Roll back", command, back, reason=True)


def stopping(watcher: Watcher, request: PageRequest) -> Page:
    run, back = named_run(watcher, request), f"/runs/{request.named['run']}"
    ends = "ends after the step that it is in and a checkpoint"
    if request.form is not None:
        # A second signal would end it without a checkpoint: the first one of a person may come from the terminal.
        message = f"It was asked to stop already, and {ends}." if run.read.stopping else f"It {ends}."
        if not run.read.stopping and not ask_to_stop(run.path):
            message = "It had ended already."
        return _done(f"{run.path.name} was asked to stop", [message], back)
    status = run.status()
    if status.state != "running":
        raise UsageError(f"{run.path.name} is not running, so there is nothing to stop")
    says = f"It is at step {status.step:,} of {status.steps:,}. It {ends}; nothing is lost."
    return _ask(request, f"Stop {run.path.name}?", says, "Stop", f"hivetune stop {quoted(run.path)}", back)


def forgetting(watcher: Watcher, request: PageRequest) -> Page:
    kind, value = _subject(request.query if request.form is None else request.form)
    if request.form is None:
        says = "All of it is removed from the store for good and kept out from now on."
        says += " Snapshots, runs and releases that contain it are listed; they are not changed."
        command, hidden = f"hivetune forget --{kind} {quoted(value)}", {"kind": kind, "value": value}
        return _ask(request, f"Forget the {kind} {value}?", says, "Forget", command, "/data", hidden=hidden)
    with closing(open_database()) as database:
        result = forget(database, kind, value)
    # A snapshot's name is the hash of its content, so it is named and not changed; `rm` deletes it with its runs.
    lines = [f"Removed and kept out from now on: {count(result.interactions, 'interaction')}."]
    lines += [f"{result.past_wins} past wins were made of them and are removed."] if result.past_wins else []
    for taint in result.taints:
        uses = ", ".join((*taint.runs, *taint.releases)) or "nothing was made of it"
        lines.append(f"The snapshot {taint.path or taint.snapshot} contains at least {taint.rows} of its rows: {uses}.")
    lines += [f"{path}: the snapshot is gone, so its rows could not be looked at." for path in result.unchecked]
    return _done(f"The {kind} {value} is forgotten", lines, "/data")


def _subject(fields: Mapping[str, str]) -> tuple[ForgetKind, str]:
    """Return the kind and the name to forget, from the form's fields. Raises UsageError."""
    kinds: tuple[ForgetKind, ...] = get_args(ForgetKind)
    kind, value = next((kind for kind in kinds if kind == fields.get("kind")), None), fields.get("value", "").strip()
    if kind is None or not value:
        raise UsageError("the form does not say what to forget", hint=f"choose {', '.join(kinds)}, and give its name")
    return kind, value


FORMS: Mapping[str, MakePage] = {
    "/runs/{run}/stop": stopping,
    "/releases/{name}/{version:int}/promote": promotion,
    "/releases/{name}/{version:int}/rollback": rolling_back,
    "/data/forget": forgetting,
}
