"""The gateway's counters for Prometheus. No label holds a prompt, a user or a session."""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hivetune.serve.capture import Capture
from hivetune.serve.servers import Keeper

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
GAUGES = {
    "waiting_requests": "Requests that wait for a slot",
    "running_requests": "Requests that are answered now",
    "swaps": "Backends that were replaced by others",
    "backend_restarts": "Backends that died and were started again",
    "captured_answers": "Answers in the store",
    "capture_waiting": "Answers that wait to be stored",
    "capture_left_out": "Answers that could not be stored",
}


class Metrics:
    """The counters of one gateway in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        by = ("release",)
        computing = "Seconds of answers without their wait for a turn"
        self._answers = Counter(
            "hivetune_answers", "Answers by release and outcome", ("outcome", "release"), registry=registry
        )
        self._tokens = Counter("hivetune_tokens", "Tokens written by release", by, registry=registry)
        self._seconds = Histogram(
            "hivetune_answer_seconds", "Seconds per answer", by, buckets=SECONDS, registry=registry
        )
        self._computing = Counter("hivetune_computing_seconds", computing, by, registry=registry)
        self._adapters = Gauge("hivetune_adapter_bytes", "Memory of each loaded adapter", by, registry=registry)
        self._gauges = {name: Gauge(f"hivetune_{name}", text, registry=registry) for name, text in GAUGES.items()}

    def answered(self, release: str, seconds: float, computing_s: float, tokens: int) -> None:
        self._answers.labels("ok", release).inc()
        self._tokens.labels(release).inc(tokens)
        self._seconds.labels(release).observe(seconds)
        self._computing.labels(release).inc(computing_s)

    def failed(self, release: str, *, broken: bool) -> None:
        self._answers.labels("broken_stream" if broken else "error", release or "none").inc()

    def vanished(self, release: str) -> None:
        self._answers.labels("client_gone", release).inc()

    def text(self, keeper: Keeper, capture: Capture | None) -> bytes:
        lives = list(keeper.lives.values())
        waiting, running = (sum(getattr(live.turns, name) for live in lives) for name in ("num_waiting", "num_running"))
        values = [waiting, running, keeper.swaps, keeper.restarts]
        values += [] if capture is None else [capture.captured, capture.waiting, capture.left_out]
        for gauge, value in zip(self._gauges.values(), values, strict=False):
            gauge.set(value)
        self._adapters.clear()
        for served in (served for live in lives for served in live.deployment.served):
            self._adapters.labels(served.label).set(served.size_bytes)
        return bytes(generate_latest(self.registry))
