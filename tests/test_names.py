"""The commands, options, settings and files that messages and pages name exist."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

from hivetune.cli.main import COMMANDS, _app
from hivetune.config import known_settings

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hivetune"
MODULES = sorted(SOURCE.rglob("*.py"))
DATA = sorted(SOURCE.rglob("*.yaml"))
LOG = ROOT / "docs" / "log.md"  # it names what was tried and is gone
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {LOG})]

# Options of other programs that a message or a page names.
FOREIGN_OPTIONS = {
    *("--logdir", "--backend-store-uri", "--project"),  # tensorboard, mlflow, trackio
    "--from",  # uvx
    *("--repo-type", "--local-dir"),  # hf download
    *("--lora", "--alias", "--host", "--port", "--parallel", "--ctx-size", "--jinja", "--no-webui"),  # llama-server
    *("--no-warmup", "--verbose"),  # llama-server
    "--output-format",  # Gemini CLI
    *("--enable-log-requests", "--enable-log-outputs"),  # vLLM
    *("--user", "--now"),  # systemctl
    *("--no-legend", "--property"),  # loginctl
    *("--minutes", "--full-precision", "--epochs", "--who", "--only", "--adapter", "--engine"),  # bench/
    *("--norc", "--noprofile"),  # bash
    *(
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--cap-drop",
        "--symlink",
        "--ro-bind",
        "--proc",
    ),
    *("--dev", "--size", "--tmpfs", "--chdir"),  # bubblewrap
    *("--limit", "--order", "--almost-all", "--archive", "--delete"),  # examples of what manual pages document
    "--noproxy",  # curl
    *(
        "--head",
        "--include-dashboard",
        "--no-monitor",
        "--address",
        "--node-ip-address",
        "--num-cpus",
        "--num-gpus",
    ),  # ray
    *("--resources", "--object-store-memory", "--temp-dir", "--disable-usage-stats", "--include-log-monitor"),  # ray
    *("--redis-username", "--redis-password"),  # ray
    "--api-key",  # of any program whose command line holds a secret
    *("--no-deps", "--dry-run", "--report", "--only-binary", "--quiet", "--disable-pip-version-check", "--dest"),  # pip
    "--token",  # of any program whose command line holds a secret
    *(
        "--torch-backend",
        "--reinstall-package",
        "--shm-size",
        "--ipc",
        "--nproc-per-node",
        "--max-restarts",
    ),  # uv, docker, torchrun
}
FOREIGN_PAGES = {"docs/gguf.md"}  # in ggml-org/ggml
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Files of a user, and of other programs, that examples and docstrings name.
EXAMPLES = re.compile(
    r"(my|run|config|chats?|rows|good|helpdesk|support|agent|questions|tickets|conversations|fragen|codex|claude-projects|v3|figures|whole_job|chat_history)(\.quarantine|\.duplicates|[-.]\d+)?\.(ya?ml|jsonl?)|(hivetune\.schema|vocab|model_comparisons|prod-grok-backend|issues)\.json"
)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def texts() -> list[tuple[str, str]]:
    """(place, text) of every string in the source, every line of its data files and every line of the pages."""
    return list(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for path in (*DATA, *PAGES):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


@functools.cache
def options_of(command: str) -> set[str]:
    """The options of a command, as its help lists them."""
    found = typer.main.get_command(_app(command)).commands[command]  # type: ignore[attr-defined]
    options = {text for parameter in found.params for text in (*parameter.opts, *parameter.secondary_opts)}
    return {text for text in options if text.startswith("-")} | {"--json", "--help", "-h"}


def command_in(words: list[str]) -> str | None:
    word = words[0].strip(".,;:()'\"")
    return word if word in COMMANDS else None


def commands_in(text: str) -> Iterator[tuple[str | None, str]]:
    """(command, the rest up to the end of what belongs to it) for each `hivetune WORD...` in a text."""
    for match in re.finditer(r"\bhivetune +([a-z][^`;|&#\n]*)", text):
        if not match[1].startswith("fp32"):  # a row of the benchmark's tables
            yield command_in(match[1].split()), match[1]


def named_commands() -> list[tuple[str, str | None, str]]:
    places = [(place, text) for place, text in texts() if "import" not in text]  # code in an example of Python
    return [(place, command, rest) for place, text in places for command, rest in commands_in(text)]


def test_every_command_that_is_named_exists() -> None:
    found = named_commands()
    assert len(found) > 100
    assert not [(place, rest) for place, command, rest in found if command is None]


def test_every_option_that_is_named_exists() -> None:
    """Behind a command: one of its own. LocalCrew in a text: one of any command."""
    wrong = []
    for place, command, rest in named_commands():
        for option in OPTION.findall(rest):
            if command and option not in options_of(command) | FOREIGN_OPTIONS:
                wrong.append(f"{place}: {command} has no {option}")
    known = FOREIGN_OPTIONS.union({"--version"}, *(options_of(command) for command in COMMANDS))
    for place, text in texts():
        wrong += [f"{place}: no {option}" for option in OPTION.findall(text) if option not in known]
    assert not wrong


def test_every_setting_that_is_named_exists() -> None:
    """`data.path`, `lora.r` and the like, wherever the first word is a section of the config."""
    keys = {setting.key for setting in known_settings()}
    sections = {key.split(".")[0] for key in keys if "." in key}
    pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(sections))})\.[a-z_]+\b(?![./(])")
    found = [(place, name) for place, text in texts() for name in pattern.findall(text)]
    assert len(found) > 30
    files = (".json", ".jsonl", ".md", ".html", ".py")  # eval.json, data.md, experts.py
    assert not [(place, name) for place, name in found if name not in keys and not name.endswith(files)]


def test_every_page_that_is_named_exists() -> None:
    name = re.compile(r"(?<![\w/.-])(?:docs|src|tools|bench|tests)/[\w./-]+\.\w+")
    found = [(place, page) for place, text in texts() for page in name.findall(text) if page not in FOREIGN_PAGES]
    assert len(found) > 10
    assert not [(place, page) for place, page in found if not (ROOT / page).exists()]


def test_every_file_that_is_named_is_written_or_read_somewhere() -> None:
    """`name.json` and the like in a message or a page: the same name stands alone in the code, as a file's name."""
    kinds = "jsonl|json|yaml|bin|db|sqlite|u32|u8|u64|safetensors"
    name = re.compile(rf"(?<![\w./*<>{{}}-])[a-z][\w.-]*\.(?:{kinds})\b(?![\w(])")
    known = {text for _, text in texts() if name.fullmatch(text)}
    known |= {path.name for folder in ("src/hivetune", "docs") for path in (ROOT / folder).rglob("*.*")}
    found = [(place, n) for place, text in texts() for n in name.findall(text) if not EXAMPLES.fullmatch(n)]
    assert len(found) > 100
    assert not [(place, n) for place, n in found if n not in known]


def test_what_tools_and_benchmarks_import_exists() -> None:
    """No test runs them (they measure for minutes), so a name that moved would be noticed too late."""
    wrong = []
    for path in sorted([*(ROOT / "bench").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")  # as text: some lines are given to another Python
        for module, names in re.findall(r"from (hivetune[\w.]*) import ([\w, ]+)", text):
            file = SOURCE.parent / Path(*module.split("."))
            source = file.with_suffix(".py") if file.with_suffix(".py").exists() else file / "__init__.py"
            for name in (name.strip() for name in names.split(" as ")[0].split(",")):
                defined = re.search(rf"^(?:class |def )?{name}\b", source.read_text(encoding="utf-8"), re.MULTILINE)
                if not defined and not (file / f"{name}.py").exists():
                    wrong.append(f"{path.relative_to(ROOT)}: {module} has no {name}")
    assert not wrong


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


# The words that docs/glossary.md gives up, where they would mislead most. Data of tests and proofs may still have them.
GIVEN_UP = re.compile(
    r"filled[ -]up|\bform(?:s|ed)? again|is no (?:run folder|number|pair|stream)\b|\bborne\b"
    r"|(?:shared|common) beginnings?|\bcome to grief\b|whatever share",
    re.IGNORECASE,
)
QUOTED = {"docs/glossary.md", "docs/log.md"}  # they name what is not said any more


def test_words_that_were_given_up_do_not_come_back() -> None:
    """In messages, docstrings, data and pages."""
    found = [(place, word) for place, text in texts() for word in GIVEN_UP.findall(text)]
    assert not [(place, word) for place, word in found if place.rpartition(":")[0] not in QUOTED]
