"""What the gateway costs: its overhead per request, its memory for idle streams, how long swaps and rollbacks take.

    python bench/gateway.py [--pairs 2000] [--streams 1000]

The model server is the stand-in of the tests (tests/llama/stub_server.py), which answers at once, so what is left
is the gateway's own. Overhead: pairs of one request to the stand-in and one through the gateway, in turn. A cold
rollback is one whose backend is killed in the same moment. The hostile client sends prompts of 2 MB, of 50,000 and
of 4,000 messages without a pause and holds 300 silent connections. Needs the packages of the tests; prints one JSON
document.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from serve.hive import Running, add_release, stub_on_path, wait_until  # noqa: E402

from hivetune.base.database import open_database  # noqa: E402
from hivetune.base.disk import home  # noqa: E402
from hivetune.release.registry import promote, rollback  # noqa: E402
from hivetune.serve.guard import make_client  # noqa: E402

BODY = {"model": "helpdesk", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
WARM_UP = 50
SERVE = (
    "import sys; from hivetune.serve.run import GatewaySettings, run_gateway\n"
    "run_gateway(GatewaySettings(port=0, slots=int(sys.argv[1])), lambda url: print(url, flush=True))"
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=2000)
    arguments.add_argument("--streams", type=int, default=1000)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="hivetune-bench-") as scratch:
        work = Path(scratch)
        os.environ.setdefault("HIVETUNE_CONVERTERS", str(home() / "converter"))  # the user's, fetched once
        os.environ["HIVETUNE_HOME"] = str(work / "home")
        os.environ["PATH"] = stub_on_path(work)
        for seed in (1, 2):
            add_release(work, "helpdesk", seed, champion=seed == 1)
        with served(work, slots=4) as running:
            found = {"pairs": given.pairs, "overhead_ms": overhead(work, running, given.pairs), **moves(work, running)}
        with served(work, slots=given.streams) as running:
            found["streams"] = streams(running, given.streams)
    print(json.dumps({"schema": 1, **found, "load_average": os.getloadavg()[0]}, indent=1))


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
