"""The command `hivetune`: the commands of commands.toml, and the one place that turns an error into a message and an
exit code.

Only the module of the command that runs is imported, so `hivetune --help` answers in about 0.15 s.
"""

import errno
import functools
import importlib
import inspect
import json
import os
import re
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hivetune import __version__
from hivetune.base.private import keep_private
from hivetune.cli.output import MODE, as_document, emit, errors_of_stdout, say, settle_encodings
from hivetune.errors import HivetuneError, Stopped, UsageError

# commands.toml says of each command: what it is `about`, the function that it `calls`, its `former` name at the top
# level, what a `stopped` one leaves behind (commands that only read, or say it themselves, are silent), and what it
# `takes`: the arguments in the order of the function's parameters. The order is that of the help, which groups the
# commands by what people do.
SECTIONS: dict[str, dict[str, dict[str, str]]] = tomllib.loads(
    Path(__file__).with_name("commands.toml").read_text(encoding="utf-8")
)
_COMMON = SECTIONS.pop("common")["arguments"]["takes"]
ENTRIES = {name: entry for section in SECTIONS.values() for name, entry in section.items()}
COMMANDS = {name: entry for name, entry in ENTRIES.items() if "calls" in entry}
# `group name` is a command of a group. A group may be a command too, as `hivetune runs` lists the runs.
GROUPS = {
    name: entry["about"] for name, entry in ENTRIES.items() if any(other.startswith(f"{name} ") for other in ENTRIES)
}
ALIASES = {entry["former"]: name for name, entry in COMMANDS.items() if "former" in entry}
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
                shown = [name for name in names if name in self.commands]
                formatter.write_dl([(name, self.commands[name].get_short_help_str(100)) for name in shown])


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
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop)
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
        _fail(UsageError(error.format_message(), hint=f"see: {_command_named(arguments)} --help"))
    except Exception as error:  # noqa: BLE001 (the last handler: it reports the error and keeps the traceback of a bug)
        _fail(_explain(error))


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
        is_command = name in COMMANDS
        groups[name] = typer.Typer(
            cls=_Group, no_args_is_help=not MODE.json and not is_command, invoke_without_command=is_command, help=text
        )
        app.add_typer(groups[name], name=name)
    current = _command_of(arguments)
    for name, entry in COMMANDS.items():
        body = _load(name) if name == current else _unloaded
        if name in GROUPS:
            groups[name].callback()(body if name == current else _root_of_group)
            continue
        group, _, last = name.rpartition(" ")
        whole = body.__doc__ if name == current else entry["about"]
        (groups[group] if group else app).command(last, cls=_Command, help=whole, short_help=entry["about"])(body)
    return app


def _command_of(arguments: list[str]) -> str | None:
    """Return the name of the command that `arguments` begin with."""
    return next((name for n in (2, 1) if (name := " ".join(arguments[:n])) in COMMANDS), None)


def _root_of_group() -> None:
    pass


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(as_document({"version": __version__}) if MODE.json else __version__)
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    pass


def _load(name: str) -> Callable[..., None]:
    """Return the function of a command, with parameters that typer understands."""
    module, _, function = COMMANDS[name]["calls"].partition(":")
    loaded: Callable[..., None] = vars(importlib.import_module(f"hivetune.cli.{module}"))[function]

    @functools.wraps(loaded)
    def body(*arguments: Any, **options: Any) -> None:
        try:
            loaded(*arguments, **options)
        except KeyboardInterrupt:  # click would print "Aborted!" and no document
            raise Stopped("stopped", signal_number=signal.SIGINT) from None

    signature = inspect.signature(loaded)
    described = zip(signature.parameters.values(), arguments_in(COMMANDS[name].get("takes", "")), strict=False)
    parameters = [
        parameter.replace(annotation=Annotated[parameter.annotation, _as_typer(*argument)])
        for parameter, argument in described
    ]
    vars(body)["__signature__"] = signature.replace(parameters=parameters)
    return body


def arguments_in(takes: str) -> list[tuple[str, str]]:
    """Return each argument that a command takes, and its meaning, if it has one.

    An indented line continues the one above. An argument without a meaning may have it from the common arguments.
    """
    common = {} if takes == _COMMON else dict(arguments_in(_COMMON))
    lines = (re.split("  +", line, maxsplit=1) for line in re.sub(r"\n +", " ", takes).splitlines())
    return [(words[0], words[1] if len(words) > 1 else common.get(words[0], "")) for words in lines]


# Metavar: the function in arguments.py that completes it.
_COMPLETED = {
    "RUN": "complete_run",
    "RUN|all": "complete_run",
    "M": "complete_model",
    "NAME@VERSION": "complete_release",
    "A.B=C": "complete_setting",
    "KEY=A,B": "complete_setting",
}


def _as_typer(argument: str, meaning: str) -> Any:
    """Return an argument such as `--model -m M` or `--port 0..65535` as typer knows it."""
    words = argument.split()
    names = [word for word in words if word.startswith("-")]
    described: dict[str, Any] = {"help": meaning}
    for word in words[len(names) :]:
        if limits := re.fullmatch(r"(?P<min>\d[\d.]*)?\.\.(?P<max>\d[\d.]*)?", word):
            described |= {end: json.loads(limit) for end, limit in limits.groupdict().items() if limit}
        else:
            described["metavar"] = word
            if word in _COMPLETED:
                described["autocompletion"] = vars(importlib.import_module("hivetune.cli.arguments"))[_COMPLETED[word]]
    return typer.Option(*names, **described) if names else typer.Argument(**described)


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
    hint = ENTRIES.get(_command_of(arguments) or "", {}).get("stopped", "")
    return Stopped(error.message, signal_number=error.signal_number, hint=error.hint or hint)


def _command_named(arguments: list[str]) -> str:
    """Return the command, or the group, that the command line begins with."""
    name = _command_of(arguments) or next((word for word in arguments[:1] if word in GROUPS), "")
    return f"hivetune {name}".strip()


def _explain(error: Exception) -> HivetuneError:
    from hivetune.cli.explain import explain  # only now: `--help` loads no database

    return explain(error)


def _fail(error: HivetuneError) -> None:
    say(f"hivetune: {error}", style="red")
    try:
        emit({"error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}})
    except OSError as unwritten:  # stderr has the error already
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if unwritten.errno != errno.EPIPE:
            say(f"hivetune: {unwritten.filename}: {unwritten.strerror}", style="red")
    sys.exit(error.exit_code)
