"""Write a home as this version leaves it, for `test_contract.py`: `home-VERSION.tar.xz`. Made once for each version.

    PYTHONPATH=tests .venv/bin/python tests/contract/make_home.py

The home holds a tiny prepared model, collected and captured rows, a finished cycle with a champion, a run that was
evaluated, exported and registered, and a run that was stopped after some steps. Its paths are absolute, so it is made
and opened at one place, `PLACE`.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PLACE = Path(tempfile.gettempdir()) / "hivetune-contract"
PORT = 8699
# What only speeds later commands up, and differs between machines.
LEFT_OUT = {"kernels", "profiles", "compiled", "logs"}


def call(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "hivetune", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    print(done.returncode, *arguments, flush=True)
    if done.returncode not in (0, 6):
        sys.exit(done.stdout + done.stderr)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def write_inputs() -> Path:
    """Rows, the tiny model and two configs. Returns the config of the plain run."""
    import yaml
    from cycle.small import append_rows, make_config, make_rows

    config = make_config(PLACE)
    append_rows(PLACE / "rows.jsonl", make_rows(0, 60))
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    del settings["cycle"]
    plain = PLACE / "plain.yaml"
    plain.write_text(yaml.safe_dump({**settings, "output": str(PLACE / "plain")}), encoding="utf-8")
    return plain


def stop_a_run(plain: Path) -> None:
    """Train `PLACE/stopped` for 40 steps and stop it after some."""
    settings = ["--set", f"output={PLACE / 'stopped'}", "--set", "max_steps=40", "--set", "epochs=100"]
    process = subprocess.Popen([sys.executable, "-m", "hivetune", "train", str(plain), *settings, "--json"])
    metrics = PLACE / "stopped" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 12:
        if process.poll() is not None:
            sys.exit("the run ended before it was stopped")
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    if process.wait() != 143:
        sys.exit(f"the stopped run ended with {process.returncode}")


def capture_answers() -> None:
    """Serve the champion, ask it twice and rate one answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hivetune", "serve", "--capture", "--port", str(PORT), "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        print(started, flush=True)
        wait_until_it_listens()
        head = {"Authorization": f"Bearer {started['token']}", "Content-Type": "application/json"}
        for question in ("What comes after red?", "What comes after blue?"):
            body = {"model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 4}
            answer = post("/v1/chat/completions", body, head)
        post("/v1/feedback", {"id": answer["id"], "rating": "up"}, head)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_until_it_listens() -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", PORT), timeout=1).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)


def post(path: str, body: dict[str, Any], head: dict[str, str]) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), head)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                document: dict[str, Any] = json.load(reply)
                return document
        except urllib.error.HTTPError as error:
            if error.code != 503:  # the model is being loaded
                sys.exit(error.read().decode())
            time.sleep(0.2)


def main() -> None:
    from hivetune import __version__

    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    os.environ["HIVETUNE_HOME"] = str(PLACE / "home")
    plain = write_inputs()
    call("cycle", str(PLACE / "cycle.yaml"), "--once")
    call("collect", str(PLACE / "rows.jsonl"))
    call("train", str(plain))
    call("eval", str(PLACE / "plain"))
    call("gate", str(PLACE / "plain"))
    call("export", str(PLACE / "plain"), "--to", "gguf-adapter")
    call("register", str(PLACE / "plain"), "--as", "plain")
    stop_a_run(plain)
    capture_answers()
    archive = Path(__file__).parent / f"home-{__version__}.tar.xz"
    with tarfile.open(archive, "w:xz") as file:
        file.add(PLACE, PLACE.name, filter=lambda info: None if LEFT_OUT & set(Path(info.name).parts) else info)
    print(f"{archive}: {archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
