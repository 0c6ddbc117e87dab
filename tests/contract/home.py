"""A home as commands leave it: a tiny model, collected and captured rows, a cycle, a champion that was evaluated,
exported and registered, and a run that was stopped after some steps.
"""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from cycle.small import append_rows, make_config, make_rows

Call = Callable[[str], tuple[int, list[Any]]]


def make_home(place: Path, call: Call, port: int) -> None:
    """Fill `place` and `place/home` by commands of `call`, which gives an exit code and the documents."""
    config = make_config(place)
    append_rows(place / "rows.jsonl", make_rows(0, 60))
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    del settings["cycle"]
    plain = {**settings, "output": str(place / "plain")}
    (place / "plain.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    for command in (
        "cycle cycle.yaml --once",
        "collect rows.jsonl",
        "train plain.yaml",
        "eval plain",
        "export plain --to gguf-adapter",
        "register plain --as plain",
        "promote plain@1 --force --reason contract",
    ):
        code, documents = call(command)
        assert code in (0, 6), (command, documents)
    _stop_a_run(place)
    _capture_answers(place, port)


def _start(place: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "hivetune", *words, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=place)


def _stop_a_run(place: Path) -> None:
    """Train `place/stopped` for many steps and stop it after some."""
    run = place / "stopped"
    words = [word for text in (f"output={run}", "max_steps=40", "epochs=100") for word in ("--set", text)]
    with _start(place, "train", "plain.yaml", *words) as process:
        metrics = run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text(encoding="utf-8").count('"step"') < 4:
            assert process.poll() is None, "the run ended before it was stopped"
            time.sleep(0.02)  # a border of two processes: there is only the file to wait on
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143


def _capture_answers(place: Path, port: int) -> None:
    """Serve the champion, ask it twice and rate one answer."""
    with _start(place, "serve", "--capture", "--port", str(port)) as process:
        try:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            _wait_until_it_listens(port)
            head = {"Authorization": f"Bearer {started['token']}", "Content-Type": "application/json"}
            for question in ("What comes after red?", "What comes after blue?"):
                body = {"model": "plain", "messages": [{"role": "user", "content": question}], "max_tokens": 4}
                answer = _post(f"{started['url']}/v1/chat/completions", body, head)
            _post(f"{started['url']}/v1/feedback", {"id": answer["id"], "rating": "up"}, head)
        finally:
            process.send_signal(signal.SIGTERM)


def _wait_until_it_listens(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)


def _post(url: str, body: dict[str, Any], head: dict[str, str]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    deadline = time.monotonic() + 180
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                document: dict[str, Any] = json.load(reply)
                return document
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            assert error.code == 503 and time.monotonic() < deadline, text  # the model is being loaded
            time.sleep(0.2)
