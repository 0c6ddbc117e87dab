"""The command `hivetune`: one table of commands, and the one place that turns an error into a message and an exit code.

Only the module of the command that was asked for is imported, so `hivetune --help` answers in about 0.15 s.
"""

import errno
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from hivetune import __version__
from hivetune.base.private import keep_private
from hivetune.cli.output import MODE, as_document, emit, errors_of_stdout, say, settle_encodings
from hivetune.errors import HivetuneError, Stopped, UsageError

# name: (module, function, one line). `group name` is a command of a group. The order is the order of the walk.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "status": ("status", "status", "One screen: what runs, what is served, what comes next."),
    "dashboard": ("dashboard", "dashboard_command", "The same and all the rest in a browser, kept up to date."),
    "demo": ("demo", "demo", "The whole walk on a real model and real text, in minutes."),
    "doctor": ("doctor", "doctor", "What this machine is and can do; what is wrong, with the command that mends it."),
    "init": ("init", "init", "A commented YAML for the rows and the machine at hand."),
    "fetch": ("model", "fetch", "Get and prepare a model; the only command that needs a network."),
    "collect": ("collect", "collect", "Interactions into the store, exactly once."),
    "data check": ("data", "check", "What is wrong with the rows, and where."),
    "data prepare": ("data", "prepare", "Rows into an immutable snapshot of tokens."),
    "data synth": ("synth", "synth", "Training rows from the documentation on this machine."),
    "data forget": ("forget", "forget", "Remove a user, session, source or row; name what it taints."),
    "plan": ("plan", "plan", "Memory, time and disk before anything long starts."),
    "train": ("train", "train", "Train an adapter; survives crashes, resumes where it stopped."),
    "learn": ("learn", "learn", "Train in two stages: good rows, then pairs and failures, if those help."),
    "sweep": ("sweep", "sweep", "Several settings side by side; losers stop, the best goes through the gate."),
    "cluster up": ("cluster", "up", "Begin a cluster with this machine, or join one."),
    "cluster status": ("cluster", "status", "The machines and devices of a cluster."),
    "cluster down": ("cluster", "down", "Leave the cluster, or end it on its head."),
    "runs": ("runs", "runs", "All runs."),
    "show": ("runs", "show", "One run: state, losses, rows."),
    "watch": ("watch", "watch", "Follow a run as it goes."),
    "top": ("top", "top", "What processor and cards do now, and who uses them."),
    "logs": ("runs", "logs", "What a run's processes printed."),
    "stop": ("runs", "stop", "Stop a run after a clean checkpoint."),
    "resume": ("runs", "resume", "Go on with a run that stopped."),
    "rm": ("prune", "rm", "Delete runs; releases made of them stay."),
    "prune": ("prune", "prune", "What can go, and how much it frees."),
    "verify-resume": ("verify", "verify_resume", "Kill and replay a short run, compare bit for bit."),
    "eval": ("judge", "evaluate", "Base and tuned model on the held-out rows."),
    "gate": ("judge", "gate", "The verdict: deploy, iterate, abort or not-enough-evidence."),
    "compare": ("compare", "compare_sides", "Any two releases, runs, GGUF files or endpoints on the same rows."),
    "lm-eval": ("lm_eval", "lm_eval", "One or two models on tasks of lm-evaluation-harness."),
    "open": ("pages", "open_page", "The newest page of a run in a browser."),
    "report": ("report", "report", "A run's points to TensorBoard, MLflow, trackio or W&B."),
    "export": ("release", "export", "Adapter, merged model or GGUF."),
    "register": ("registry", "register", "Keep a run as the next version of a name."),
    "registry": ("registry", "show_registry", "All releases, their aliases and verdicts."),
    "why": ("registry", "why", "Where a release comes from and what speaks for it."),
    "promote": ("registry", "promote", "Make a release the champion of its name."),
    "frozen": ("frozen", "show_frozen", "Questions that every release must keep, and none may learn."),
    "rollback": ("registry", "rollback", "Return to the previous champion."),
    "retire": ("registry", "retire", "Take a name's champion out of service."),
    "serve": ("serve", "serve", "The OpenAI API of the registered champions."),
    "clients": ("clients", "show_clients", "Who may ask the gateway; tokens are made and revoked here."),
    "cycle": ("cycle", "cycle", "Train, compare, promote and watch again and again, without people."),
    "experts": ("experts", "experts", "Adapters of their own for single domains: found, trained, judged, retired."),
    "route": ("route", "route_request", "Which adapter of a family answers a request, and why."),
    "chat": ("chat", "chat", "Talk to a run, a release or a GGUF file, or to two."),
    "bench": ("bench", "bench", "Throughput and memory on this machine, against peers where installed."),
    "config": ("config", "config", "The settings: JSON Schema, defaults."),
}
# What a command leaves behind when it is stopped before its end. The others only read, or say it themselves.
LEFT_BEHIND = {
    "demo": "each finished station is kept; the same command goes on",
    "fetch": "the model is not ready; what is downloaded is kept, and the same command goes on",
    "data check": "nothing was written",
    "data prepare": "no snapshot was made; finished chunks are kept, and the same command goes on",
    "data synth": "no file was written; replies of --ask are kept, and the same command goes on",
    "train": "what is finished is kept; the same command goes on",
    "learn": "each finished stage is kept; the same command goes on",
    "sweep": "what is finished is kept; the same command goes on",
    "cycle": "what is finished is kept; the same command goes on",
    "experts": "what is finished is kept; the same command goes on",
    "verify-resume": "the runs were temporary, and their folder is removed",
    "eval": "no new eval.json was written, an earlier one is kept; the same command goes on where it was",
    "compare": "answers that were given are kept; the same command goes on",
    "lm-eval": "models that were measured are kept; the same command goes on with the next",
    "bench": "nothing of it goes on, and nothing is kept",
    "export": "no half-made file is left, an earlier export is kept; the same command begins again",
}
EXIT_CODES = (
    "Exit codes: 0 done, 1 unexpected, 2 usage or config, 3 data refused, 4 machine not fit, 5 does not fit, "
    "6 the gate did not say deploy, 7 recovery exhausted, 75 busy, 130 or 143 stopped by a signal (docs/exit-codes.md)."
)
GROUPS = {
    "data": "Check, prepare, make and forget rows.",
    "cluster": "Several machines whose devices compute a step together.",
}


class _Command(TyperCommand):
    """A command whose help is a document too."""

    def get_help(self, ctx: Any) -> str:
        return _help(super().get_help(ctx))


class _Group(TyperGroup):
    """A group whose help is a document too."""

    def get_help(self, ctx: Any) -> str:
        return _help(super().get_help(ctx))


def _help(text: str) -> str:
    return as_document({"help": text}) if MODE.json else text


def main() -> None:
    """Run one command and exit with its documented code."""
    keep_private()
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    MODE.json = len(arguments) < len(sys.argv) - 1
    settle_encodings()
    if "_HIVETUNE_COMPLETE" in os.environ:  # a shell asks what fits; typer has bash's line in another variable
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        arguments = line.split()[1:]
    arguments = arguments or ["status"]
    try:
        _check_working_directory()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # start.py waits
        # Under --json typer's own errors come here; else typer prints them, with the usage of the command.
        try:
            sys.exit(_app(arguments)(args=arguments, prog_name="hivetune", standalone_mode=not MODE.json))
        finally:
            _flush()
    except Stopped as error:
        _fail(_with_left_behind(error, arguments))
    except _Signalled as signalled:
        _fail(_with_left_behind(Stopped("stopped", signal_number=signalled.number), arguments))
    except HivetuneError as error:
        _fail(error)
    except KeyboardInterrupt:
        _fail(_with_left_behind(Stopped("stopped", signal_number=signal.SIGINT), arguments))
    except typer.TyperException as error:
        _fail(UsageError(error.format_message(), hint=f"see: {_asked_for(arguments)} --help"))
    except Exception as error:  # noqa: BLE001 (the last one to meet it: told, and the traceback of a bug is kept)
        _fail(_explain(error))


def _check_working_directory() -> None:
    """Raises UsageError where it was deleted: no relative path leads anywhere, and no child process can start in it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory was deleted", hint="cd to a folder that is there") from None


def _flush() -> None:
    """Writes what is left of the output while an error of it can still be told: Python itself ends with 120 and words
    of its own. Raises OSError."""
    if sys.stdout is None:  # closed by who started this
        return
    try:
        with errors_of_stdout():
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing is tried again at the end
        if error.errno != errno.EPIPE:  # who reads has seen enough
            raise


def _app(arguments: list[str]) -> typer.Typer:
    app = typer.Typer(
        cls=_Group,
        no_args_is_help=not MODE.json,
        add_completion=not MODE.json,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="From the interactions you already have to a better local model. `--json` on every command: one document.",
        epilog=EXIT_CODES,
    )
    app.callback()(_root)
    groups = {
        name: typer.Typer(cls=_Group, no_args_is_help=not MODE.json, help=help_text)
        for name, help_text in GROUPS.items()
    }
    for name, group in groups.items():
        app.add_typer(group, name=name)
    for name, (module, function, help_text) in COMMANDS.items():
        words = name.split()
        parent = groups[words[0]] if len(words) == 2 else app
        body = _load(module, function) if arguments[: len(words)] == words else _unloaded
        help_text_long = body.__doc__ if body is not _unloaded else help_text
        parent.command(words[-1], cls=_Command, help=help_text_long, short_help=help_text)(body)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(as_document({"version": __version__}) if MODE.json else __version__)
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    pass


def _load(module: str, function: str) -> Callable[..., None]:
    loaded: Callable[..., None] = vars(importlib.import_module(f"hivetune.cli.{module}"))[function]

    @functools.wraps(loaded)
    def body(*arguments: Any, **options: Any) -> None:
        try:
            loaded(*arguments, **options)
        except KeyboardInterrupt:  # click would end with "Aborted!", without the document and what is left behind
            raise Stopped("stopped", signal_number=signal.SIGINT) from None

    return body


def _unloaded() -> None:
    raise AssertionError("a command that was not asked for ran")


class _Signalled(SystemExit):
    """SIGTERM or SIGHUP, wherever the command is. No error: who goes on after any failure must not go on after this."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _Signalled(number)


def _with_left_behind(error: Stopped, arguments: list[str]) -> Stopped:
    """With what the command leaves behind as its hint, unless whoever stopped knew better."""
    left = next((left for name, left in LEFT_BEHIND.items() if arguments[: len(name.split())] == name.split()), "")
    return Stopped(error.message, signal_number=error.signal_number, hint=error.hint or left)


def _asked_for(arguments: list[str]) -> str:
    """The command, or the group, that the command line begins with."""
    for words in (arguments[:2], arguments[:1]):
        if " ".join(words) in COMMANDS or " ".join(words) in GROUPS:
            return " ".join(("hivetune", *words))
    return "hivetune"


def _explain(error: Exception) -> HivetuneError:
    from hivetune.cli.explain import explain  # only now: `--help` loads no database

    return explain(error)


def _fail(error: HivetuneError) -> None:
    say(f"hivetune: {error}", style="red")
    try:
        emit({"error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}})
    except OSError as unwritten:  # it is said on stderr all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if unwritten.errno != errno.EPIPE:
            say(f"hivetune: {unwritten.filename}: {unwritten.strerror}", style="red")
    sys.exit(error.exit_code)
