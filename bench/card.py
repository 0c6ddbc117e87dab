"""Everything about one card in one command, for a bare machine without a network: right first, then fast.

    python bench/card.py --minutes 9 --out DIR            the first card
    python bench/card.py --minutes 9 --out DIR --device cpu --tiny     does the tool run?

Carried along: this repository and a Python with torch, transformers, peft, safetensors and tokenizers (and trl for its
part). Models have true shapes and random weights, rows are random. Each part is a process of its own, with a share of
the time; what it finds is in DIR/card.json at once, so the results are valid when the whole is cut off at any moment.
Nothing of this was run on a card yet. Parts in this order:

    facts      the doctor's look              job      1,500 rows, 3 epochs, 0.5B: every step
    peers    TRL's SFTTrainer on the same rows, where it is installed
    correct    loss, each gradient, graphs    1.5b 3b 7b   steps of larger models
    resume     a killed run, gone on with
    0.5b       steps, memory, kernels

DIR/card.md is a table and DIR/card.svg a plot of the same, DIR/PART.log what a part printed.
"""

import argparse
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oncard.report import Report

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
# Part and the most seconds that it may take; what is left of the minutes bounds it too.
PARTS = {
    "facts": 30.0,
    "correct": 120.0,
    "resume": 120.0,
    "0.5b": 90.0,
    "job": 120.0,
    "peers": 150.0,
    "1.5b": 90.0,
    "3b": 120.0,
    "7b": 180.0,
}
# A part with less time than this is not begun: loading torch takes most of it.
LEAST_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few repetitions")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        return compute(arguments.part, arguments.device, arguments.out.resolve(), arguments.tiny)
    report = Report(arguments.out, device=arguments.device, minutes=arguments.minutes, tiny=arguments.tiny)
    until = time.monotonic() + 60 * arguments.minutes
    for part in arguments.parts:
        left_s = min(PARTS[part], until - time.monotonic())
        if left_s < LEAST_S:
            report.end(part, "not begun", 0.0)
            continue
        started = time.monotonic()
        print(f"{part} ...", end=" ", flush=True)
        status = run_part(part, arguments, report, left_s)
        report.end(part, status, time.monotonic() - started)
        print(f"{status}, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{report.table()}\n{arguments.out / 'card.json'}")


def compute(part: str, device: str, out: Path, tiny: bool) -> None:
    """In a part's own process: a line of JSON for each thing that is found."""
    from oncard import right

    (out / "work").mkdir(exist_ok=True)
    if part in right.PARTS:
        found = right.PARTS[part](device, out / "work", tiny)
    else:  # loads torch, which the first parts do without
        from oncard import speed

        timed = {**speed.PARTS, **{size: functools.partial(speed.steps_of, size) for size in speed.SIZES}}
        found = timed[part](device, out / "work", tiny)
    for key, value in found:
        print(json.dumps({"key": key, "value": value}), flush=True)


def run_part(part: str, arguments: argparse.Namespace, report: Report, left_s: float) -> str:
    """How it ended: done, cut off (its time was over), failed. What it found meanwhile is in the report."""
    command = [sys.executable, str(HERE / "card.py"), "--part", part, "--out", str(arguments.out)]
    command += ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)]),
        "HIVETUNE_HOME": str(arguments.out.resolve() / "work" / "home"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with open(arguments.out / f"{part}.log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True, bufsize=0
        )
        try:
            for line in lines_until(process, time.monotonic() + left_s):
                report.note(part, *read_line(line))
            cut_off = not has_ended(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if cut_off:
        return "cut off"
    if process.returncode == 0:
        return "done"
    tail = (arguments.out / f"{part}.log").read_text(errors="replace").strip().splitlines()[-1:]
    report.note(part, "error", tail[0] if tail else f"ended with {process.returncode}")
    return "failed"


def lines_until(process: "subprocess.Popen[bytes]", until: float) -> Iterator[bytes]:
    """Its lines, to the end or until the time is over."""
    assert process.stdout is not None
    buffer = b""
    while (left_s := until - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left_s)[0]:
            return
        chunk = os.read(process.stdout.fileno(), 65536)
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from lines


def has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """It closed its output, so it is on its way out."""
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        return False
    return True


def read_line(line: bytes) -> tuple[str, Any]:
    """A library may print too; that is kept as it is."""
    try:
        told = json.loads(line)
        return told["key"], told["value"]
    except (ValueError, KeyError, TypeError):
        return "printed", line.decode(errors="replace")


if __name__ == "__main__":
    main()
