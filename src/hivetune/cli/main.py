"""The command `hivetune`: the table of commands, and the one place that turns an error into a message and an exit code.

Only the module of the command that runs is imported, so `hivetune --help` answers in about 0.15 s.
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
from hivetune.process.stop import take_stops

# name: (module, function, one line). `group name` is a command of a group. The order is the order of the help.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "init": ("init", "init", "Look at rows and machine, and write a commented config."),
    "demo": ("demo", "demo", "Run every step once on a small real model, in minutes."),
    "doctor": ("doctor", "doctor", "Test this machine, and explain errors."),
    "fetch": ("arguments", "fetch", "Download and prepare a model."),
    "collect": ("collect", "collect", "Copy interactions into the store."),
    "data check": ("data", "check", "Report what is wrong with rows, and where."),
    "data prepare": ("data", "prepare", "Turn rows into a snapshot of tokens."),
    "data synth": ("synth", "synth", "Make training rows from documentation."),
    "data forget": ("data", "forget", "Delete a user, session, source or row from the store."),
    "config": ("init", "config", "List the settings, or print their JSON Schema."),
    "plan": ("plan", "plan", "Predict memory, time and disk of a run."),
    "train": ("train", "train", "Train an adapter, or continue its run."),
    "cluster up": ("cluster", "up", "Start a cluster on this machine, or join one."),
    "cluster status": ("cluster", "status", "List the machines and devices of a cluster."),
    "cluster down": ("cluster", "down", "Leave the cluster, or end it from its head."),
    "stop": ("runs", "stop", "Stop a run after saving a checkpoint."),
    "resume": ("training", "resume", "Continue a run that stopped."),
    "eval": ("judge", "evaluate", "Measure base and tuned model on held-out rows."),
    "gate": ("judge", "gate", "Decide whether the tuned model is better."),
    "compare": ("judge", "compare_sides", "Compare two models on the same rows."),
    "bench": ("demo", "bench", "Time a training step on this machine."),
    "bench lm-eval": ("judge", "lm_eval", "Measure models on tasks of lm-evaluation-harness."),
    "export": ("release", "export", "Write an adapter, a merged model or a GGUF file."),
    "register": ("release", "register", "Add a run to the registry as a new release."),
    "promote": ("release", "promote", "Make a release the champion of its name."),
    "rollback": ("release", "rollback", "Return to the previous champion."),
    "registry": ("release", "show_registry", "List releases, and manage what they rest on."),
    "registry why": ("release", "why", "Explain where a release comes from."),
    "registry retire": ("release", "retire", "Take a champion out of service."),
    "registry frozen": ("release", "show_frozen", "List questions that every new release must answer."),
    "serve": ("serve", "serve", "Serve the champions over the OpenAI API."),
    "clients": ("serve", "show_clients", "List clients of the gateway; create or revoke tokens."),
    "chat": ("chat", "chat", "Talk to one model, or to two side by side."),
    "cycle": ("cycle", "cycle", "Train, judge and promote whenever new rows arrive."),
    "status": ("status", "status", "Show what runs, what is served and what comes next."),
    "dashboard": ("status", "dashboard_command", "Show runs, releases and rows in a browser."),
    "runs": ("runs", "runs", "List runs, or delete them."),
    "runs rm": ("runs", "rm", "Delete runs."),
    "runs prune": ("runs", "prune", "Delete files that nothing needs any more."),
    "runs open": ("runs", "open_page", "Open the newest page of a run in a browser."),
    "runs top": ("runs", "top", "Show how busy this machine is, and with what."),
    "show": ("runs", "show_run", "Show one run: state, losses, faults."),
    "watch": ("runs", "watch", "Follow a run until it ends."),
    "logs": ("runs", "logs", "Print the log of a run."),
}
GROUPS = {
    "data": "Check, prepare, make or delete rows.",
    "cluster": "Train on several machines at once.",
    "bench": "Time a training step on this machine, or measure models on standard tasks.",
    "registry": "List releases with their aliases and verdicts, or manage what they rest on.",
    "runs": "List all runs, newest first, or do something with them.",
}
# Former names at the top level, which keep working.
ALIASES = {
    "rm": "runs rm",
    "prune": "runs prune",
    "open": "runs open",
    "top": "runs top",
    "why": "registry why",
    "retire": "registry retire",
    "frozen": "registry frozen",
    "lm-eval": "bench lm-eval",
}
# How the help groups the commands: by what people do.
SECTIONS = {
    "Start": ("init", "demo", "doctor", "fetch", "collect", "data", "config"),
    "Train": ("plan", "train", "cluster", "stop", "resume"),
    "Judge": ("eval", "gate", "compare", "bench"),
    "Serve": ("export", "register", "registry", "promote", "rollback", "serve", "clients", "chat"),
    "Keep going": ("cycle",),
    "Look": ("status", "dashboard", "runs", "show", "watch", "logs"),
}
# What a stopped command leaves behind. Commands that only read, or say it themselves, are not listed.
LEFT_BEHIND = {
    "demo": "finished steps are kept; the same command continues",
    "fetch": "the model is not ready; downloaded files are kept, and the same command continues",
    "data check": "nothing was written",
    "data prepare": "no snapshot was made; finished chunks are kept, and the same command continues",
    "data synth": "no file was written; replies of --ask are kept, and the same command continues",
    "train": "finished steps are kept; the same command continues",
    "cycle": "finished work is kept; the same command continues",
    "eval": "no new eval.json was written, an earlier one is kept; the same command continues",
    "compare": "finished answers are kept; the same command continues",
    "bench": "nothing was kept",
    "bench lm-eval": "models that were measured are kept; the same command continues with the next",
    "export": "no partial file is left, an earlier export is kept; the same command starts again",
}
EXIT_CODES = (
    "Exit codes: 0 success, 1 unexpected error, 2 wrong usage or config, 3 data refused, 4 machine unsuitable, "
    "5 does not fit, 6 the gate did not say deploy, 7 recovery failed, 75 busy, 130 or 143 stopped by a signal "
    "(docs/exit-codes.md)."
)


class _Command(TyperCommand):
    """A command whose help is one JSON document under --json."""

    def get_help(self, ctx: Any) -> str:
        return _help(super().get_help(ctx))


class _Group(TyperGroup):
    """A group of commands whose help is a JSON document under --json."""

    def get_help(self, ctx: Any) -> str:
        return _help(super().get_help(ctx))


class _Root(_Group):
    """The command `hivetune`, whose help lists the commands by what people do."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(100)) for name in names])


def _help(text: str) -> str:
    return as_document({"help": text}) if MODE.json else text


def main() -> None:
    """Run one command and exit with its documented code."""
    keep_private()
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    MODE.json = len(arguments) < len(sys.argv) - 1
    settle_encodings()
    if "_HIVETUNE_COMPLETE" in os.environ:  # a shell completes; bash and the others use different variables
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        arguments = line.split()[1:]
    arguments = arguments or ["status"]
    arguments = [*ALIASES.get(arguments[0], arguments[0]).split(), *arguments[1:]]
    try:
        _check_working_directory()
        take_stops(_stop, (signal.SIGTERM, signal.SIGHUP))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # start.py waits
        # Under --json typer's own errors are handled here; otherwise typer prints them with the usage.
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
        name = _command_of(arguments) or next((word for word in arguments[:1] if word in GROUPS), "")
        _fail(UsageError(error.format_message(), hint=f"see: {f'hivetune {name}'.strip()} --help"))
    except Exception as error:  # noqa: BLE001 (the last handler: it reports the error and keeps the traceback of a bug)
        from hivetune.cli.explain import explain  # only now: `--help` loads no database

        _fail(explain(error))


def _check_working_directory() -> None:
    """Raise UsageError if it was deleted: no relative path resolves then, and no child process can start."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory was deleted", hint="change to a folder that exists") from None


def _flush() -> None:
    """Write the rest of the output while an error can still be reported; Python itself would exit with 120.

    Raises OSError.
    """
    if sys.stdout is None:  # the parent process closed it
        return
    try:
        with errors_of_stdout():
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python does not try again at exit
        if error.errno != errno.EPIPE:  # the reader has closed the pipe
            raise


def _app(arguments: list[str]) -> typer.Typer:
    """Return the commands as typer knows them; only the module of the one that `arguments` name is imported."""
    app = typer.Typer(
        cls=_Root,
        no_args_is_help=not MODE.json,
        add_completion=not MODE.json,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Train a better local model from interactions that you already have. "
        "Every command takes `--json` and then prints one JSON document.",
        epilog=EXIT_CODES,
    )
    app.callback()(_root)
    groups = {}
    for name, text in GROUPS.items():
        is_command = name in COMMANDS  # such a group does something by itself, as `hivetune runs` lists the runs
        groups[name] = typer.Typer(
            cls=_Group, no_args_is_help=not MODE.json and not is_command, invoke_without_command=is_command, help=text
        )
        app.add_typer(groups[name], name=name)
    current = _command_of(arguments)
    for name, (module, function, help_text) in COMMANDS.items():
        parts = name.split()
        body = _load(module, function) if name == current else _unloaded
        if name in GROUPS:
            groups[name].callback()(body if name == current else lambda: None)
            continue
        parent = groups[parts[0]] if len(parts) == 2 else app
        help_text_long = body.__doc__ if body is not _unloaded else help_text
        parent.command(parts[-1], cls=_Command, help=help_text_long, short_help=help_text)(body)
    return app


def _command_of(arguments: list[str]) -> str | None:
    """Return the name of the command that `arguments` begin with."""
    return next((name for n in (2, 1) if (name := " ".join(arguments[:n])) in COMMANDS), None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(as_document({"version": __version__}) if MODE.json else __version__)
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    pass


def _load(module: str, function: str) -> Callable[..., None]:
    from hivetune.process.forkserver import forking  # only now: `--help` starts no process

    loaded: Callable[..., None] = vars(importlib.import_module(f"hivetune.cli.{module}"))[function]

    @functools.wraps(loaded)
    def body(*arguments: Any, **options: Any) -> None:
        try:
            with forking():
                loaded(*arguments, **options)
        except (KeyboardInterrupt, typer.Abort):  # at a question; click would print "Aborted!" and no document
            raise Stopped("stopped", signal_number=signal.SIGINT) from None

    return body


def _unloaded() -> None:
    raise AssertionError("a command that was not asked for ran")


class _Signalled(SystemExit):
    """SIGTERM or SIGHUP. Not a subclass of Exception, so that `except Exception` does not catch it."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _Signalled(number)


def _with_left_behind(error: Stopped, arguments: list[str]) -> Stopped:
    """Return the error. Without a hint of its own it gets the command's leftovers as its hint."""
    hint = LEFT_BEHIND.get(_command_of(arguments) or "", "")
    return Stopped(error.message, signal_number=error.signal_number, hint=error.hint or hint)


def _fail(error: HivetuneError) -> None:
    say(f"hivetune: {error}", style="red")
    try:
        if not (MODE.is_done and isinstance(error, Stopped)):
            emit({"error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}})
    except OSError as unwritten:  # stderr has the error already
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if unwritten.errno != errno.EPIPE:
            say(f"hivetune: {unwritten.filename}: {unwritten.strerror}", style="red")
    sys.exit(error.exit_code)
