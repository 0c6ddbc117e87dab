"""What a person can do here: promote, roll back, stop a run, forget. Each is confirmed on its own page, and does the
same as the command of that name."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import get_args

from hivetune.base.database import open_database
from hivetune.base.paths import quoted
from hivetune.dashboard.page import Page, PageRequest
from hivetune.dashboard.pages.releases import found_release
from hivetune.dashboard.watched import Watcher
from hivetune.data.forget import ForgetKind, forget
from hivetune.errors import NotThere, UsageError
from hivetune.judge.measure.frozen import freeze_wins
from hivetune.release.registry import promote, returns_to, rollback
from hivetune.run.status import ask_to_stop
from hivetune.serve.register import who

LONGEST_REASON = 500


@dataclass(frozen=True)
class ConfirmedForm:
    """A form in two pages. `confirm` makes the page that asks. `do` gets the posted form and makes the page with the
    result."""

    confirm: Callable[[Watcher, PageRequest], Page]
    do: Callable[[Watcher, PageRequest], Page]


@dataclass(frozen=True)
class Question:
    """A page that asks. `command`: the same in a terminal. `reason`: whether the form has a field for one. `hidden`:
    values that the form carries."""

    asks: str
    says: str
    button: str
    command: str
    back: str
    reason: bool = False
    hidden: tuple[tuple[str, str], ...] = ()


def _ask(asked: PageRequest, question: Question) -> Page:
    return Page("confirm.html", question.asks, {"question": question, "path": asked.path})


def _done(title: str, lines: list[str], back: str) -> Page:
    return Page("done.html", title, {"lines": lines, "back": back})


def _confirm_promotion(watcher: Watcher, asked: PageRequest) -> Page:
    release = found_release(asked)
    verdict = release.verdict or "not judged"
    says = f"Its verdict is: {verdict}. It becomes what {release.name} means, and what is served."
    if verdict != "deploy" or release.withdrawn:
        why = f"was rolled back ({release.withdrawn})" if release.withdrawn else f"has the verdict {verdict}"
        says = f"It {why}, so this is refused here; to promote it all the same, use the command with --force."
    command = f"hivetune promote {release.label}"
    back = f"/releases/{release.name}/{release.version}"
    return _ask(asked, Question(f"Promote {release.label}?", says, "Promote", command, back, reason=True))


def _promote(watcher: Watcher, asked: PageRequest) -> Page:
    release = found_release(asked)
    with closing(open_database()) as database:
        promoted = promote(database, release.label, by=who(), reason=_reason(asked))
    frozen = freeze_wins(promoted)
    lines = [f"{promoted.label} is the champion."]
    lines += [f"{frozen} of its right answers are frozen questions now."] if frozen else []
    return _done(f"{promoted.label} is the champion", lines, f"/releases/{promoted.name}/{promoted.version}")


def _confirm_rollback(watcher: Watcher, asked: PageRequest) -> Page:
    release = found_release(asked)
    if "champion" not in release.aliases:
        raise UsageError(f"{release.label} is not the champion, so there is nothing to roll back")
    with closing(open_database()) as database:
        earlier = returns_to(database, release.name)
    if earlier is None:
        raise UsageError(f"there is no champion before {release.label} to return to")
    says = f"It is withdrawn, and {earlier.label} takes its place: in what the name means, and in what is served."
    command = f"hivetune rollback {release.name}"
    back = f"/releases/{release.name}/{release.version}"
    return _ask(asked, Question(f"Roll {release.label} back?", says, "Roll back", command, back, reason=True))


def _roll_back(watcher: Watcher, asked: PageRequest) -> Page:
    """Roll back only the champion that the page showed: another release may be champion by now."""
    release = found_release(asked)
    with closing(open_database()) as database:
        champion, withdrawn = rollback(database, release.label, by=who(), reason=_reason(asked))
    said = f"{champion.label} is the champion again; {withdrawn.label} is withdrawn"
    return _done(said, [f"{said}."], f"/releases/{champion.name}/{champion.version}")


def _confirm_stop(watcher: Watcher, asked: PageRequest) -> Page:
    run = watcher.run(asked.named["run"])
    if run is None:
        raise NotThere("there is no such run")
    status = run.status()
    if status.state != "running":
        raise UsageError(f"{run.path.name} is not running")
    says = f"It is at step {status.step:,} of {status.steps:,}. It ends after a checkpoint; nothing is lost."
    command = f"hivetune stop {quoted(run.path)}"
    return _ask(asked, Question(f"Stop {run.path.name}?", says, "Stop", command, f"/runs/{asked.named['run']}"))


def _stop(watcher: Watcher, asked: PageRequest) -> Page:
    run = watcher.run(asked.named["run"])
    if run is None:
        raise NotThere("there is no such run")
    if run.read.stopping:  # a second signal would end it without a checkpoint
        words = "It was asked to stop already, and ends after the step that it is in and a checkpoint."
    elif ask_to_stop(run.path):
        words = "It ends after the step that it is in and a checkpoint."
    else:
        words = "It had ended already."
    return _done(f"{run.path.name} was asked to stop", [words], f"/runs/{asked.named['run']}")


def _confirm_forgetting(watcher: Watcher, asked: PageRequest) -> Page:
    kind, value = _whom(asked.query)
    says = (
        "All of it is removed from the store for good and kept out from now on. Snapshots, runs and releases that hold"
        " it are named; they are not changed."
    )
    command = f"hivetune data forget --{kind} {quoted(value)}"
    hidden = (("kind", kind), ("value", value))
    return _ask(asked, Question(f"Forget the {kind} {value}?", says, "Forget", command, "/data", hidden=hidden))


def _forget(watcher: Watcher, asked: PageRequest) -> Page:
    kind, value = _whom(asked.form)
    with closing(open_database()) as database:
        gone = forget(database, kind, value)
    lines = [f"{gone.interactions:,} interactions were removed, and are kept out from now on."]
    lines += [f"{gone.past_wins} past wins were made of them and are removed."] if gone.past_wins else []
    for taint in gone.taints:
        made = ", ".join((*taint.runs, *taint.releases)) or "nothing was made of it"
        lines.append(f"The snapshot {taint.path or taint.snapshot} holds at least {taint.rows} of its rows: {made}.")
    lines += [f"{path}: the snapshot is gone, so its rows could not be looked at." for path in gone.unchecked]
    if not gone.taints:
        lines.append("No snapshot that is there holds any of it.")
    return _done(f"The {kind} {value} is forgotten", lines, "/data")


def _whom(fields: Mapping[str, str]) -> tuple[ForgetKind, str]:
    """Return what to forget. Raises UsageError."""
    value = fields.get("value", "").strip()
    kind = next((known for known in get_args(ForgetKind) if known == fields.get("kind")), None)
    if kind is None or not value:
        raise UsageError("say whom to forget", hint=f"one of {', '.join(get_args(ForgetKind))}, and which")
    return kind, value


def _reason(asked: PageRequest) -> str:
    return asked.form.get("reason", "").strip()[:LONGEST_REASON]


FORMS: Mapping[str, ConfirmedForm] = {
    "/runs/{run}/stop": ConfirmedForm(_confirm_stop, _stop),
    "/releases/{name}/{version:int}/promote": ConfirmedForm(_confirm_promotion, _promote),
    "/releases/{name}/{version:int}/rollback": ConfirmedForm(_confirm_rollback, _roll_back),
    "/data/forget": ConfirmedForm(_confirm_forgetting, _forget),
}
