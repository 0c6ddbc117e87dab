"""A home with a tiny real model, releases whose adapters answer differently, and a gateway as a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from gguf_families import write_model
from once import copy_of
from programs import write_program
from safetensors.numpy import save_file

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, home, sha256_file, write_json, write_manifest
from hivetune.models.worker.weights import open_weights
from hivetune.release.gguf import SERVED_QUANT, base_gguf, write_gguf
from hivetune.release.registry import promote, register

MODEL = "smollm2-135m"  # the name under which the tiny model is found, as a prepared one
RANK = 4
START_TIMEOUT_S = 60.0


def make_home() -> Path:
    """Put the prepared tiny model and its GGUF file into `$HIVETUNE_HOME`."""
    folder = home() / "models" / MODEL
    if not folder.exists():
        copy_of("home", _fill_home, home())
    return folder


def _fill_home(work: Path) -> None:
    folder = work / "models" / MODEL
    write_model(folder, "llama")
    (folder / MANIFEST).unlink()
    write_manifest(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIVETUNE_HOME", str(work))
        base_gguf(MODEL, sha256_file(folder / MANIFEST), SERVED_QUANT)


def add_release(work: Path, name: str, seed: int, *, champion: bool = False) -> str:
    """Register a release with a random adapter and return its label. No other `seed` gives the same answers."""
    model = make_home()
    run = work / f"run-{name}-{seed}"
    write_adapter(model, run, seed)
    (run / "config.resolved.yaml").write_text("config: {}\n")
    write_json(run / "run.json", {"name": name, "model": str(model)})
    exported = run / "export" / "gguf-adapter"
    copy_of(f"adapter-{seed}", lambda work: _export_adapter(model, run, work), exported)
    (exported / "lora.gguf").rename(exported / f"{name}-lora.gguf")
    adapter_sha256 = sha256_file(run / "adapter_model.safetensors")
    write_manifest(exported, {"adapter_sha256": adapter_sha256})
    about = {
        "model": MODEL,
        "model_sha256": sha256_file(model / MANIFEST),
        "adapter_sha256": adapter_sha256,
        "snapshot": "none",
        "verdict": "deploy",
        "proof": {},
    }
    with closing(open_database()) as database:
        release, _ = register(database, run, name, about, by="test")
        if champion:
            promote(database, release.label, by="test", reason="test")
    return release.label


def _export_adapter(model: Path, run: Path, target: Path) -> None:
    made = write_gguf(model, run, None, run / "task", "lora.gguf", lambda done, total: None)
    made.rename(target / made.name)


def write_adapter(model: Path, folder: Path, seed: int, spread: float = 0.5) -> None:
    """Write PEFT's two files with random values, large enough to change the first token of most answers of the tiny
    model."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for name, stored in open_weights(model).items():
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = stored.shape
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{stem}.lora_A.weight"] = random.normal(0, spread, (RANK, columns)).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = random.normal(0, spread, (rows, RANK)).astype(np.float32)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@dataclass
class Running:
    """A gateway that listens. `log`: its standard error."""

    process: "subprocess.Popen[str]"
    url: str
    token: str
    log: Path

    def client(self, **headers: str) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.token}", **headers}, timeout=300
        )

    def chat(self, text: str, model: str = "", **more: Any) -> dict[str, Any]:
        """Return the document of one answer, 4 tokens long."""
        with self.client() as client:
            body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
            answer = client.post("/v1/chat/completions", json={**body, **more})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        assert answer.headers["x-hivetune-release"] == found["system_fingerprint"]
        return found

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels. `name` may include some of them."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        begins = (name,) if "{" in name else (f"{name} ", f"{name}{{")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(begins))

    def backends(self) -> list[int]:
        """Return the process ids of the model servers."""
        import psutil

        family = psutil.Process(self.process.pid).children()
        return [child.pid for child in family if "hivetune.llama.child" in " ".join(child.cmdline())]


@contextmanager
def gateway(log: Path, *arguments: str, token: str = "") -> Iterator[Running]:
    """Run `hivetune serve` on a free port until SIGTERM. `token` is needed from the second start on."""
    command = [sys.executable, "-m", "hivetune", "serve", "--port", "0", "--json", "--slots", "2", "--threads", "1"]
    with open(log, "a", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*command, "--context", "256", *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        said = json.loads(line)
        running = Running(process, said["url"], said["token"] or token, log)
        wait_until(lambda: health(running) == 200)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextmanager
def own_gateway(folder: Path, releases: int = 1, *, stub: bool = False) -> Iterator[Running]:
    """Run a gateway that captures, with a home of its own (`folder`/home) and releases of helpdesk, of which the first
    is the champion. With `stub` a stand-in answers, not llama.cpp."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # what the process has, other tests have not
            patch.setenv("HIVETUNE_HOME", str(folder / "home"))
            if stub:
                patch.setenv("PATH", stub_on_path(folder))
            for seed in range(1, releases + 1):
                add_release(folder, "helpdesk", seed, champion=seed == 1)
            running = stack.enter_context(gateway(folder / "log", "--capture"))
        yield running


def stub_on_path(folder: Path) -> str:
    """Make a PATH on which `llama-server` is a stand-in without a model (llama/stub_server.py)."""
    source = Path(__file__).parents[1] / "llama" / "stub_server.py"
    program = write_program(folder / "stub" / "llama-server", source.read_text(encoding="utf-8"))
    return f"{program.parent}:{os.environ['PATH']}"


def health(running: Running) -> int:
    with running.client() as client:
        return client.get("/health").status_code


def wait_until(holds: Any, timeout_s: float = START_TIMEOUT_S) -> None:
    import time

    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def stored(columns: str = "id, source, row") -> Sequence[tuple[Any, ...]]:
    with closing(open_database()) as database:
        return database.execute(f"SELECT {columns} FROM interactions ORDER BY rowid").fetchall()
