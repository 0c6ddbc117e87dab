"""The command `hivetune`: the table of commands, and the one place that turns an error into a message and an exit code.

Only the module of the command that runs is imported, so `hivetune --help` answers in about 0.15 s.
"""

import errno
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from hivetune import __version__
from hivetune.base.private import keep_private
from hivetune.cli.output import (
    MODE,
    as_document,
    emit,
    error_document,
    errors_of_stdout,
    explain,
    say,
    set_encodings,
)
from hivetune.errors import HivetuneError, Stopped, UsageError
from hivetune.process.stop import handle_stop_signals

# Of each section of the help its commands: the module below hivetune.cli, its function and one line.
SECTIONS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
    "Start": {
        "init": ("machine", "init", "Inspect your rows and this machine, and write a commented config."),
        "demo": ("machine", "demo", "Run every step once on a small real model, in minutes."),
        "doctor": ("machine", "doctor", "Test this machine, and report what to fix."),
        "fetch": ("machine", "fetch", "Download and prepare a model."),
        "config": ("look", "config", "List the settings, or print their JSON Schema."),
    },
    "Rows": {
        "collect": ("rows", "collect", "Copy interactions into the store."),
        "check": ("rows", "check", "Report what is wrong with rows, and where."),
        "synth": ("rows", "synth", "Make training rows from documentation."),
        "forget": ("rows", "forget", "Delete a user, session, source or row from the store."),
    },
    "Train": {
        "plan": ("train", "plan", "Predict a run's memory, time and disk use."),
        "train": ("train", "train", "Train an adapter, or resume its run."),
        "stop": ("train", "stop", "Stop a run after saving a checkpoint."),
        "bench": ("train", "bench", "Measure time, memory and losses of a config, for several settings."),
    },
    "Judge": {
        "eval": ("judge", "evaluate", "Measure a run on held-out rows, and decide whether it is better."),
        "compare": ("judge", "compare_sides", "Compare two models on the same rows."),
    },
    "Release": {
        "export": ("release", "export", "Write an adapter, a merged model or a GGUF file."),
        "register": ("release", "register", "Add a run to the registry as a new release."),
        "releases": ("release", "releases", "List releases, or explain one."),
        "promote": ("release", "promote", "Make a release the champion of its name."),
        "rollback": ("release", "rollback", "Return to the previous champion."),
    },
    "Serve": {
        "serve": ("serve", "serve", "Serve the champions over the OpenAI API."),
        "clients": ("serve", "show_clients", "List clients of the gateway; create or revoke tokens."),
        "chat": ("chat", "chat", "Chat with a run, a release or a GGUF file."),
        "cycle": ("serve", "cycle", "Train, judge and promote whenever new rows arrive."),
    },
    "Look": {
        "status": ("status", "status", "Show what runs, what is served and what comes next."),
        "dashboard": ("status", "dashboard_command", "Show runs, releases and rows in a browser."),
        "runs": ("look", "runs", "List runs, newest first."),
        "show": ("look", "show_run", "Show a run's state, losses and faults, or its log; follow it with -f."),
        "rm": ("look", "rm", "Delete runs, or files that are no longer needed."),
    },
}
COMMANDS = {name: found for section in SECTIONS.values() for name, found in section.items()}
# Stopped, these continue where they were; the others start again.
CONTINUES = frozenset({"demo", "fetch", "train", "eval", "compare", "cycle"})
EXIT_CODES = (
    "Exit codes: 0 success, 1 unexpected error, 2 wrong usage or config, 3 data refused, 4 machine unsuitable, "
    "5 does not fit, 6 the verdict is not deploy, 7 recovery failed, 75 busy, 130 or 143 stopped by a signal "
    "(docs/exit-codes.md)."
)


def main() -> None:
    """Run one command and exit with its documented code."""
    keep_private()  # before anything is written
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    MODE.json = len(arguments) < len(sys.argv) - 1
    set_encodings()  # before anything is said
    arguments = arguments or ["status"]  # the one screen
    name = arguments[0] if arguments[0] in COMMANDS else ""
    try:
        os.getcwd()  # raises if it was deleted: no relative path resolves then, and no child process can start
        handle_stop_signals(_stop, (signal.SIGTERM, signal.SIGHUP))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # start.py waits
        try:
            sys.exit(_app(name)(args=arguments, prog_name="hivetune", standalone_mode=False))
        finally:
            _flush()
    except _Signalled as signalled:
        _fail(Stopped("stopped", signal_number=signalled.number), name)
    except HivetuneError as error:
        _fail(error, name)
    except (KeyboardInterrupt, typer.Abort):
        _fail(Stopped("stopped", signal_number=signal.SIGINT), name)
    except typer.TyperException as error:
        _fail(UsageError(error.format_message(), hint=f"see: {f'hivetune {name}'.strip()} --help"), name)
    except Exception as error:  # noqa: BLE001 (the last handler: it reports the error and keeps the traceback of a bug)
        _fail(explain(error), name)


def _fail(error: HivetuneError, name: str) -> NoReturn:
    if isinstance(error, Stopped) and name in CONTINUES and not error.hint:
        hint = "finished work is kept; run it again to resume"
        error = Stopped(error.message, signal_number=error.signal_number, hint=hint)
    say(f"hivetune: {error}", style="red")
    try:
        if not (MODE.is_done and isinstance(error, Stopped)):
            emit({"error": error_document(error)})
    except OSError as unwritten:  # stderr has the error already
        _close_stdout()
        if unwritten.errno != errno.EPIPE:
            say(f"hivetune: {unwritten.filename}: {unwritten.strerror}", style="red")
    sys.exit(error.exit_code)


def _flush() -> None:
    """Write the rest of the output. Raises OSError."""
    # While an error can still be reported: at its own end Python would exit with 120.
    if sys.stdout is None:  # the parent process closed it
        return
    try:
        with errors_of_stdout():
            sys.stdout.flush()
    except OSError as error:
        _close_stdout()
        if error.errno != errno.EPIPE:  # the reader has closed the pipe
            raise


def _close_stdout() -> None:
    """Redirect stdout to /dev/null, so that flushing at exit cannot fail."""
    # Else Python tries again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class _Root(TyperGroup):
    """The command `hivetune`, whose help lists the commands by what people do."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, _, text) in commands.items()])


def _app(current: str) -> typer.Typer:
    """Return the typer application; only the module of the command `current` is imported."""
    app = typer.Typer(
        cls=_Root,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Fine-tune a local language model with LoRA on your own chats and agent logs. "
        "Every command takes `--json` and then prints one JSON document; `demo` prints one for each step.",
        epilog=EXIT_CODES,
    )
    app.callback()(_root)
    for name, (module, function, text) in COMMANDS.items():
        body = _load(module, function) if name == current else _unloaded
        app.command(name, help=body.__doc__ or text, short_help=text)(body)
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
        except KeyboardInterrupt:  # typer would end the process without a word
            raise Stopped("stopped", signal_number=signal.SIGINT) from None

    return body


def _unloaded() -> None:
    raise AssertionError("a command that was not asked for ran")


class _Signalled(SystemExit):
    """Raised by the handler of SIGTERM and SIGHUP; the exit code is 128 + the number of the signal."""

    # A SystemExit, so that `except Exception` does not catch it.

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _Signalled(number)
