"""`hivetune bench`: one training step timed on this machine, beside its own limit and beside peers."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

import hivetune
from hivetune.base.disk import home
from hivetune.cli.output import duration, emit, number, say, size, table
from hivetune.errors import HivetuneError, MachineNotFit

HARNESS = Path(hivetune.__file__).resolve().parents[2] / "bench" / "train_step.py"
OWN_ROWS = ("limit", "hivetune")


def bench(
    peers: Annotated[
        bool, typer.Option(help="Also TRL and transformers + PEFT, each in an environment of its own.")
    ] = (False),
    sets: Annotated[str, typer.Option(help="short, agents, long, prefix: which rows a step has.")] = "short,agents",
    out: Annotated[Path | None, typer.Option(help="Write JSON here, table and plot beside it.")] = None,
) -> None:
    """Seconds, tokens and memory of a training step here; with --peers against others (they are installed first)."""
    if not HARNESS.exists():
        raise MachineNotFit("the benchmark is not part of the package", hint="run it in a clone of the repository")
    with tempfile.TemporaryDirectory() as folder:
        target = out or Path(folder) / "bench.json"
        command = [sys.executable, str(HARNESS), "--out", str(target), "--sets", sets]
        if not peers:
            command += ["--rows", ",".join(OWN_ROWS)]
        code = _run(command, Path(folder))
        if code != 0:
            raise HivetuneError(f"the benchmark ended with exit code {code}", hint="its output stands above")
        document: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    for name in dict.fromkeys(line["set"] for line in document["summary"]):
        _show_set(name, [line for line in document["summary"] if line["set"] == name])
    if out:
        say(f"written: {out}, {out.with_suffix('.md').name}, {out.with_suffix('.svg').name}")
    emit({key: document[key] for key in ("machine", "model", "data", "rows", "summary", "seconds")})


def _run(command: list[str], folder: Path) -> int:
    """Its exit code. However this process is stopped, nothing of the benchmark goes on, its files go with `folder`, and
    so does a peer's environment that is half installed."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for peer in (home() / "bench").glob("peer-*"):
            if not (peer / ".ready").exists():
                shutil.rmtree(peer, ignore_errors=True)


def _show_set(name: str, lines: list[dict[str, Any]]) -> None:
    table(
        name,
        ("row", "precision", "s/step", "tokens/s", "of the limit", "memory above weights", "1,500 x 3 (projected)"),
        [
            (line["row"], line["dtype"], f"void: {'; '.join(line['void'])}", "", "", "", "")
            if line["void"]
            else (
                line["row"],
                line["dtype"],
                number(line["step_s"], 2),
                f"{line['tokens_per_s']:,.0f}",
                f"{100 * line['share_of_limit']['median']:.0f} %" if "share_of_limit" in line else "-",
                size(line["peak_above_bytes"]) if "peak_above_bytes" in line else "-",
                duration(line["job_s"]),
            )
            for line in lines
        ],
        numeric=("s/step", "tokens/s", "of the limit", "memory above weights"),
    )
