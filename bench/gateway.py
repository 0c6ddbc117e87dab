"""What the gateway costs: its overhead per request, its memory for idle streams, how long swaps and rollbacks take,
what one hostile client among sixteen costs the others, and how long a short request waits beside a long prompt.

    python bench/gateway.py [--pairs 2000] [--streams 1000] [--only overhead,hostile,streams,long]

The model server is the stand-in of the tests (tests/llama/stub_server.py), which answers at once, so what is left
is the gateway's own; for `long` it is llama.cpp with the demo's model and two random adapters. Overhead: pairs of one
request to the stand-in and one through the gateway, in turn. A cold rollback is one whose backend is killed in the same
moment. The hostile client, a process of its own with a token of its own, sends prompts of 2 MB, of 50,000 and of 4,000
messages without a pause and holds 300 silent connections. Needs the packages of the tests; prints one JSON document.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from serve.hive import MODEL, Running, add_release, stub_on_path, wait_until  # noqa: E402

from hivetune.base.database import open_database  # noqa: E402
from hivetune.base.disk import home  # noqa: E402
from hivetune.models.prepared import fetch_model  # noqa: E402
from hivetune.release.registry import promote, rollback  # noqa: E402
from hivetune.serve.guard import make_client  # noqa: E402

BODY = {"model": "helpdesk", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
WARM_UP = 50
PARTS = ("overhead", "hostile", "streams", "long")
ROUNDS, CLIENTS, REQUESTS = 5, 15, 20
ATTACKER_STARTS_S = 3.0
LONG_TOKENS, LONG_BEGINS_S = 2700, 1.0
SERVE = (
    "import sys; from hivetune.serve.run import GatewaySettings, run_gateway\n"
    "run_gateway(GatewaySettings(port=0, slots=int(sys.argv[1])), lambda url: print(url, flush=True))"
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=2000)
    arguments.add_argument("--streams", type=int, default=1000)
    arguments.add_argument("--only", default=",".join(PARTS), help="parts to measure, by commas")
    given = arguments.parse_args()
    parts = set(given.only.split(","))
    found: dict[str, object] = {}
    model = fetch_model(MODEL) if "long" in parts else None
    with tempfile.TemporaryDirectory(prefix="hivetune-bench-") as scratch:
        work = Path(scratch)
        os.environ.setdefault("HIVETUNE_CONVERTERS", str(home() / "converter"))  # the user's, fetched once
        if model is not None:
            os.environ["HIVETUNE_HOME"] = str(work / "real")
            (work / "real" / "models").mkdir(parents=True)
            (work / "real" / "models" / MODEL).symlink_to(model)
            add_releases(work / "adapters")
            with served(work, slots=4) as running:
                found["long"] = beside_a_long_prompt(running)
        if parts - {"long"}:
            os.environ["HIVETUNE_HOME"] = str(work / "home")
            os.environ["PATH"] = stub_on_path(work)
            add_releases(work)
        if parts & {"hostile", "overhead"}:
            with served(work, slots=4) as running:
                if "hostile" in parts:
                    found["hostile"] = hostile(running)
                if "overhead" in parts:
                    found |= {"pairs": given.pairs, "overhead_ms": overhead(work, running, given.pairs)}
                    found |= moves(work, running)
        if "streams" in parts:
            with served(work, slots=given.streams) as running:
                found["streams"] = streams(running, given.streams)
    print(json.dumps({"schema": 1, **found, "load_average": os.getloadavg()[0]}, indent=1))


def add_releases(work: Path) -> None:
    for seed in (1, 2):
        add_release(work, "helpdesk", seed, champion=seed == 1)


@contextlib.contextmanager
def served(work: Path, slots: int) -> Iterator[Running]:
    with closing(open_database()) as database:
        token = make_client(database, f"bench-{slots}")
    with open(work / "log", "a") as log:
        command = [sys.executable, "-c", SERVE, str(slots)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        running = Running(process, process.stdout.readline().strip(), token, work / "log")
        with running.client() as client:
            wait_until(lambda: client.get("/health").status_code == 200)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def overhead(work: Path, running: Running, pairs: int) -> dict[str, float]:
    """Milliseconds through the gateway less those of the request before it to the stand-in itself."""
    path = work / "direct.sock"
    stub = subprocess.Popen([str(work / "stub" / "llama-server"), "--host", str(path)])
    try:
        wait_until(path.exists)
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport, base_url="http://localhost") as direct, running.client() as through:
            times = [(once(direct), once(through)) for _ in range(WARM_UP + pairs)][WARM_UP:]
    finally:
        stub.kill()
        stub.wait()
    extra = sorted(1000 * (gateway - alone) for alone, gateway in times)
    return {
        "p50": round(statistics.median(extra), 3),
        "p99": round(extra[int(0.99 * (len(extra) - 1))], 3),
        "direct_p50": round(1000 * statistics.median(alone for alone, _ in times), 3),
    }


def once(client: httpx2.Client) -> float:
    started = time.perf_counter()
    client.post("/v1/chat/completions", json=BODY).raise_for_status()
    return time.perf_counter() - started


def moves(work: Path, running: Running) -> dict[str, float]:
    """Seconds from the line in the registry to the first answer of the other release."""

    def until(label: str) -> float:
        started = time.perf_counter()
        wait_until(lambda: running.chat("hello", "helpdesk")["model"] == label)
        return round(time.perf_counter() - started, 3)

    with closing(open_database()) as database:
        promote(database, "helpdesk@2", by="bench", reason="bench", force=True)
        promoted = until("helpdesk@2")
        rollback(database, "helpdesk", by="bench", reason="bench")
        warm = until("helpdesk@1")
        label = add_release(work, "helpdesk", 3, champion=True)
        swap = until(label)
        for pid in running.backends():
            os.kill(pid, signal.SIGKILL)
        rollback(database, "helpdesk", by="bench", reason="bench")
        cold = until("helpdesk@1")
    return {"promotion_s": promoted, "rollback_warm_s": warm, "swap_s": swap, "rollback_cold_s": cold}


def of_client(running: Running, name: str) -> Running:
    """Return the gateway for a client with a token of its own."""
    with closing(open_database()) as database:
        return replace(running, token=make_client(database, name))


def attack(running: tuple[str, str], over: Event) -> None:
    """Ask without a pause, beside silent connections, until it is over."""
    url, token = running
    many = [{"role": "user", "content": "x"}]
    prompts = ([{"role": "user", "content": "word " * 400_000}], many * 50_000, many * 4000)
    bodies = [json.dumps({"model": "helpdesk", "messages": turns, "max_tokens": 4}).encode() for turns in prompts]
    host, port = urlsplit(url).hostname, urlsplit(url).port
    headers = {"Authorization": f"Bearer {token}"}
    with contextlib.ExitStack() as stack, httpx2.Client(base_url=url, headers=headers, timeout=60) as client:
        for _ in range(300):
            stack.enter_context(closing(socket.create_connection((host, port))))
        while not over.is_set():
            for body, is_refused in zip(bodies, (True, True, False), strict=True):
                status = client.post("/v1/chat/completions", content=body).status_code
                assert status == 400 or not is_refused, status


def hostile(running: Running) -> dict[str, float]:
    """Milliseconds that fifteen clients wait for short answers, in rounds with and without a hostile one."""
    waits: dict[bool, list[float]] = {False: [], True: []}
    spawned = multiprocessing.get_context("spawn")
    attacks = of_client(running, "hostile")
    others = [of_client(running, f"other-{number}") for number in range(CLIENTS)]

    def ask(own: Running, times: list[float]) -> None:
        with own.client() as client:
            for _ in range(REQUESTS):
                times.append(once(client))
                time.sleep(0.05)

    for _ in range(ROUNDS):
        for attacked, times in waits.items():
            over = spawned.Event()
            attacker = spawned.Process(target=attack, args=((attacks.url, attacks.token), over))
            if attacked:
                attacker.start()
                time.sleep(ATTACKER_STARTS_S)
            threads = [threading.Thread(target=ask, args=(own, times)) for own in others]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if attacked:
                assert attacker.is_alive(), "the hostile client ended before the others"
                over.set()
                attacker.join()
    alone, beside = (1000 * statistics.quantiles(waits[kind], n=100)[98] for kind in (False, True))
    return {"p99_alone": round(alone, 1), "p99_attacked": round(beside, 1), "ratio": round(beside / alone, 2)}


def beside_a_long_prompt(running: Running) -> dict[str, object]:
    """Seconds of a client's short request to one adapter, alone and while another client's long prompt is computed with
    another adapter. Each prompt begins otherwise, so that no cache has it."""
    one, other = of_client(running, "long"), of_client(running, "short")
    found: dict[str, list[float]] = {"alone_s": [], "beside_s": [], "long_s": []}
    tokens: list[int] = []

    def seconds(name: str, own: Running, text: str, model: str, **more: int) -> None:
        started = time.perf_counter()
        usage = own.chat(text, model, **more)["usage"]
        found[name].append(round(time.perf_counter() - started, 2))
        tokens.append(usage["prompt_tokens"])

    for number in range(ROUNDS):
        seconds("alone_s", other, f"{number}: what is a hive?", "helpdesk@2", max_tokens=8)
        text = f"{number} " + "word " * (LONG_TOKENS - 20)
        long = threading.Thread(target=seconds, args=("long_s", one, text, "helpdesk@1"), kwargs={"max_tokens": 1})
        long.start()
        time.sleep(LONG_BEGINS_S)
        seconds("beside_s", other, f"{number}: and who lives in one?", "helpdesk@2", max_tokens=8)
        long.join()
        assert len(found["long_s"]) == number + 1, "the long prompt failed"
    return {"prompt_tokens": max(tokens), "longest_beside_s": max(found["beside_s"]), **found}


def streams(running: Running, count: int) -> dict[str, float]:
    """Memory of the gateway's process before and with `count` streams that have begun and say nothing."""
    process = psutil.Process(running.process.pid)
    before = process.memory_info().rss
    body = {**BODY, "messages": [{"role": "user", "content": "idle"}], "stream": True}
    limits = httpx2.Limits(max_connections=count)
    begun = threading.Semaphore(0)
    over = threading.Event()

    def hold(client: httpx2.Client) -> None:
        with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            next(stream.iter_lines())
            begun.release()
            over.wait()

    headers = {"Authorization": f"Bearer {running.token}"}
    with httpx2.Client(base_url=running.url, headers=headers, timeout=120, limits=limits) as client:
        threads = [threading.Thread(target=hold, args=(client,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for _ in threads:
            begun.acquire()
        rss = process.memory_info().rss
        over.set()
        for thread in threads:
            thread.join()
    return {"count": count, "gateway_mb": round(rss / 1e6, 1), "added_mb": round((rss - before) / 1e6, 1)}


if __name__ == "__main__":
    main()
