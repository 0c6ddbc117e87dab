"""What a command that the user named prints for `--help`, as a page. Nothing else is ever run."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hivetune.synth.sources.page import DocBlock, DocPage, NotUnderstood
from hivetune.synth.sources.structure import page_of

HELP_TIMEOUT_S = 20.0
MAX_HELP_BYTES = 1 << 20
MAX_WRITTEN_BYTES = 16 << 20  # in one file, its output included
_OVERSTRUCK = re.compile(r".\x08|\x1b\[[0-9;]*[A-Za-z]")  # and colours
_TWO_COLUMNS = re.compile(r"^(\s+)(\S.*?\S|\S)\s{2,}(\S.*)$")
_HEADING = re.compile(r"^(\S[^:]{0,60}):\s*$")
_USAGE = re.compile(r"^\s*usage:\s*(.*)$", re.IGNORECASE)


def help_page(command: str, text: str, path: Path) -> DocPage:
    """Return the page that `command --help` printed. Raises NotUnderstood."""
    blocks = [DocBlock("heading", 0, "OPTIONS")]
    usage = ""
    for line in _OVERSTRUCK.sub("", text).expandtabs().splitlines():
        last, stripped = blocks[-1], line.strip()
        if (match := _USAGE.match(line)) and not usage:
            usage = match[1]
        elif match := _HEADING.match(line):
            blocks.append(DocBlock("subheading", 0, match[1]))
        elif match := _TWO_COLUMNS.match(line):
            blocks += [DocBlock("term", 0, match[2]), DocBlock("text", 1, match[3])]
        elif line.startswith(" ") and stripped and last.kind in ("text", "term"):  # a line that goes on
            if stripped.startswith("-"):
                blocks.append(DocBlock("term", 0, stripped))
            elif last.kind == "term":
                blocks.append(DocBlock("text", 1, stripped))
            else:
                blocks[-1] = DocBlock("text", last.depth, f"{last.text} {stripped}")
        elif stripped:
            blocks.append(DocBlock("text", 0, stripped))
    if usage:
        blocks += [DocBlock("heading", 0, "SYNOPSIS"), DocBlock("text", 0, usage)]
    return page_of(blocks, path, f"{command} --help", command=command)


def run_help(command: Sequence[str]) -> str:
    """Return what a command prints for --help; some print it to standard error, some end with 1.

    Nothing of it is left running. Files take what it prints, since a pipe would wait for all that it has started.
    """
    shown = f"{' '.join(command)} --help"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                [*command, "--help"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**os.environ, "PAGER": "cat", "MANPAGER": "cat", "COLUMNS": "200", "TERM": "dumb"},
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_WRITTEN_BYTES, MAX_WRITTEN_BYTES)),
            )
        except OSError as error:
            raise NotUnderstood(f"its help can't be read: {shown}: {error}") from None
        try:
            process.wait(HELP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NotUnderstood(f"its help did not end in {HELP_TIMEOUT_S:.0f} s: {shown}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (err, out):
            file.seek(0)
        printed = out.read(MAX_HELP_BYTES + 1) or err.read(MAX_HELP_BYTES + 1)
    if len(printed) > MAX_HELP_BYTES:  # a part would end within what one option does
        raise NotUnderstood(f"its help prints more than {MAX_HELP_BYTES >> 10} KiB: {shown}")
    return printed.decode("utf-8", "replace")
