"""Numbers about cycles, releases, training and cards, for Prometheus. No label holds a row, a user or a run.

A look costs some queries of hive.db and the end of one journal. The gateway adds them to its own numbers; where no
gateway runs, `hivetune report all --to prometheus FILE` writes them for node_exporter's textfile collector.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from sqlite3 import Connection, Error

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hivetune.base.database import database_path, open_database
from hivetune.base.disk import lock_holder, write_atomic
from hivetune.base.journal import read_tail
from hivetune.base.sealed import read_sealed
from hivetune.cycle.ledger import PAUSED, acts_of, cycles_of, loop_folder, loop_names
from hivetune.errors import UsageError
from hivetune.machine.telemetry import read_cards
from hivetune.release.registry import releases
from hivetune.run.folder import METRICS, PLAN
from hivetune.run.status import running_runs

_CARDS = {
    "used_bytes": ("hivetune_card_used_bytes", "Memory of a card in use"),
    "memory_bytes": ("hivetune_card_memory_bytes", "Memory of a card"),
    "temperature_c": ("hivetune_card_temperature_celsius", "Temperature of a card"),
    "watts": ("hivetune_card_watts", "Power that a card draws"),
    "busy_percent": ("hivetune_card_busy_percent", "Share of the time that a card computes"),
}


class HomeCollector(Collector):
    """A collector that reads this home at each look. It holds nothing and locks nothing."""

    def collect(self) -> Iterator[Metric]:
        yield from _cards()
        if not database_path().exists():
            return
        try:
            with closing(open_database()) as database:
                metrics = [*_cycles(database), *_releases(database), *_training()]
        except (Error, UsageError):  # damaged, locked: the other numbers are wanted all the more
            metrics = []
        yield _gauge("hivetune_database_readable", "1 while hive.db can be read", bool(metrics))
        yield from metrics

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that registering the collector does not read the home."""
        return iter(())


def write_textfile(path: Path) -> None:
    """Write the numbers atomically: a collector may read the file at any moment. Raises OSError."""
    registry = CollectorRegistry()
    registry.register(HomeCollector())
    write_atomic(path, generate_latest(registry))


def _cycles(database: Connection) -> Iterator[Metric]:
    running = GaugeMetricFamily("hivetune_cycle_running", "1 while the loop's process lives", labels=["name"])
    paused = GaugeMetricFamily("hivetune_cycle_paused", "1 while a person has paused the loop", labels=["name"])
    is_open = GaugeMetricFamily("hivetune_cycle_open", "1 while a cycle is open", labels=["name"])
    ended = CounterMetricFamily("hivetune_cycles", "Cycles by how they ended", labels=["name", "ended"])
    closed = GaugeMetricFamily("hivetune_cycle_closed_timestamp_seconds", "When one was closed last", labels=["name"])
    acts = CounterMetricFamily("hivetune_cycle_acts", "Acts by outcome", labels=["name", "act", "outcome"])
    hours = CounterMetricFamily("hivetune_cycle_training_hours", "Hours of training", labels=["name"])
    energy = CounterMetricFamily("hivetune_cycle_training_kwh", "Energy of training, or its estimate", labels=["name"])
    for name in loop_names():
        folder = loop_folder(name)
        running.add_metric([name], lock_holder(folder) is not None)
        paused.add_metric([name], (folder / PAUSED).exists())
        cycles, past_acts = cycles_of(database, name), acts_of(database, name)
        is_open.add_metric([name], any(cycle.closed is None for cycle in cycles))
        for ending, count in sorted(Counter(cycle.end for cycle in cycles if cycle.end is not None).items()):
            ended.add_metric([name, ending], count)
        closed.add_metric([name], max((cycle.closed or 0.0 for cycle in cycles), default=0.0))
        for (act, outcome), count in sorted(Counter((a.kind, a.outcome) for a in past_acts if a.outcome).items()):
            acts.add_metric([name, act, outcome], count)
        hours.add_metric([name], sum(past_act.details.get("hours", 0.0) for past_act in past_acts))
        energy.add_metric([name], sum(past_act.details.get("kwh", 0.0) for past_act in past_acts))
    yield from (running, paused, is_open, ended, closed, acts, hours, energy)


def _releases(database: Connection) -> Iterator[Metric]:
    champion = GaugeMetricFamily("hivetune_champion_version", "Version of the champion", labels=["name"])
    newest = GaugeMetricFamily("hivetune_newest_version", "Version that was registered last", labels=["name"])
    versions: dict[str, int] = {}
    for release in releases(database):
        versions[release.name] = max(release.version, versions.get(release.name, 0))
        if "champion" in release.aliases:
            champion.add_metric([release.name], release.version)
    for name, version in sorted(versions.items()):
        newest.add_metric([name], version)
    yield from (champion, newest)


def _training() -> Iterator[Metric]:
    """Yield the metrics of the running training run, the newest if there are several."""
    going = running_runs()
    yield _gauge("hivetune_training_runs", "Running runs", len(going))
    if not going:
        return
    entry = next((r for r in reversed(read_tail(going[0] / METRICS)) if r["event"] == "step"), None)
    try:
        planned = read_sealed(going[0] / PLAN)["steps"]
    except UsageError:  # damaged: `hivetune status` tells
        return
    yield _gauge("hivetune_training_steps_planned", "Planned steps of the current run", planned)
    if entry is not None:
        yield _gauge("hivetune_training_step", "Steps that it has made", entry["step"])
        if entry["loss"] is not None:
            yield _gauge("hivetune_training_loss", "Loss of its newest step, in nats per token", entry["loss"])
        if entry.get("seconds"):
            speed = entry.get("tokens", 0) / entry["seconds"]
            yield _gauge("hivetune_training_tokens_per_second", "Speed of its newest step", speed)


def _cards() -> Iterator[Metric]:
    cards = read_cards()
    for sensor, (name, text) in _CARDS.items():
        family = GaugeMetricFamily(name, text, labels=["card"])
        for index, card in enumerate(cards):
            if sensor in card:
                family.add_metric([str(index)], card[sensor])
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def dashboard() -> str:
    """Return a Grafana dashboard as JSON to import. Its data source is chosen there."""
    return Path(__file__).with_name("grafana.json").read_text(encoding="utf-8")
