"""The numbers for Prometheus, read by its own parser. The Grafana dashboard asks for nothing else."""

import json
import re
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from journals import make_run, make_steps
from prometheus_client.parser import text_string_to_metric_families

from hivetune.base.database import open_database
from hivetune.base.disk import lock
from hivetune.cycle.ledger import PAUSED, CycleRow, begin_act, begin_cycle, end_act, end_cycle, loop_folder
from hivetune.dashboard.exporters.prometheus import HomeCollector, dashboard, write_textfile
from hivetune.run.status import hold_run
from hivetune.serve.gateway.metrics import Metrics

Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(text: str) -> Samples:
    """Return (name, values of the labels in the order of their names) -> value."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_home(tmp_path: Path) -> Samples:
    path = tmp_path / "hivetune.prom"
    write_textfile(path)
    return samples(path.read_text())


def make_loop(name: str) -> None:
    loop_folder(name).mkdir(parents=True)
    with closing(open_database()) as database:
        for number, end in enumerate(("promoted", "refused", "refused")):
            cycle = CycleRow(f"c{number}", name, 10.0 * number, "rows", {}, "pool", None)
            begin_cycle(database, cycle)
            act = begin_act(database, name, cycle.id, "train", 10.0 * number)
            end_act(database, act, "done", 10.0 * number + 3, "", {"hours": 0.5, "kwh": 0.25})
            end_cycle(database, cycle, end, "", 10.0 * number + 5)  # type: ignore[arg-type]
        begin_act(database, name, None, "open", 40.0)


def test_an_empty_home_tells_of_no_loop(own_home: Path, tmp_path: Path) -> None:
    assert not [name for name, _ in of_home(tmp_path) if name.startswith("hivetune_cycle")]
    assert not (own_home / "hive.db").exists(), "who looks makes nothing"


def test_a_damaged_database_is_told_and_hides_nothing_else(own_home: Path, tmp_path: Path) -> None:
    make_loop("helpdesk")
    assert of_home(tmp_path)["hivetune_database_readable", ()] == 1
    (own_home / "hive.db").write_bytes(b"no database" * 1000)
    text = Metrics([HomeCollector()]).text(SimpleNamespace(lives={}, swaps=0, restarts=0), None).decode()  # type: ignore[arg-type]
    told = samples(text)
    assert told["hivetune_database_readable", ()] == 0 and ("hivetune_swaps", ()) in told


def test_what_a_loop_has_done(tmp_path: Path) -> None:
    make_loop("helpdesk")
    told = of_home(tmp_path)
    assert told["hivetune_cycles_total", ("refused", "helpdesk")] == 2
    assert told["hivetune_cycle_acts_total", ("train", "helpdesk", "done")] == 3
    assert ("open", "helpdesk", "goes_on") not in {labels for _, labels in told}  # a counter must not fall
    assert told["hivetune_cycle_training_hours_total", ("helpdesk",)] == 1.5
    assert told["hivetune_cycle_training_kwh_total", ("helpdesk",)] == 0.75
    assert told["hivetune_cycle_closed_timestamp_seconds", ("helpdesk",)] == 25.0
    quiet = [told[f"hivetune_cycle_{state}", ("helpdesk",)] for state in ("running", "paused", "open")]
    (loop_folder("helpdesk") / PAUSED).touch()
    with lock(loop_folder("helpdesk")):
        told = of_home(tmp_path)
    assert quiet == [0, 0, 0]
    assert [told[f"hivetune_cycle_{state}", ("helpdesk",)] for state in ("running", "paused")] == [1, 1]


def test_the_run_that_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    make_steps(run, 1, 12)
    assert of_home(tmp_path)["hivetune_training_runs", ()] == 0
    with hold_run(run):
        told = of_home(tmp_path)
    assert told["hivetune_training_runs", ()] == 1
    assert (told["hivetune_training_step", ()], told["hivetune_training_steps_planned", ()]) == (12, 1000)
    assert told["hivetune_training_tokens_per_second", ()] == 1280
    assert not any("mine-abc" in labels for _, labels in told), "a label for each run would never end"


def names_of_panels(document: dict[str, Any]) -> Iterable[str]:
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            yield from re.findall(r"hivetune_[a-z_]+", target["expr"])


def test_the_dashboard_asks_for_what_is_told_and_for_all_of_it(tmp_path: Path) -> None:
    make_loop("helpdesk")
    run = make_run(tmp_path)
    make_steps(run, 1, 2)
    metrics = Metrics([HomeCollector()])
    metrics.answered("id", "helpdesk@1", "client", 1.0, 0.5, 9)
    keeper: Any = SimpleNamespace(lives={}, swaps=0, restarts=0)
    with hold_run(run):
        text = metrics.text(keeper, None).decode()
    told = set(re.findall(r"^(hivetune_[a-z_]+?)(?:_created)?[ {]", text, re.MULTILINE))
    # Series that need a card or a release; their families are named in any case.
    families = set(re.findall(r"^# TYPE (hivetune_[a-z_]+)", text, re.MULTILINE))
    asked = set(names_of_panels(json.loads(dashboard())))
    assert asked <= told | families
    histogram = {f"hivetune_answer_seconds{part}" for part in ("", "_count", "_sum", "_bucket")}
    assert {name for name in families - histogram if not name.endswith("_created")} <= asked
