"""The commands that look after runs, on folders as a supervisor leaves them."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command import hivetune
from dashboard.shown import supervisor

from hivetune.base.database import open_database
from hivetune.base.disk import lock, write_json
from hivetune.base.journal import Journal
from hivetune.cli.runs import CHART_HEIGHT, CHART_WIDTH, text_chart
from hivetune.config import parse_config
from hivetune.errors import UsageError
from hivetune.process.detach import cycle_unit, start_detached
from hivetune.release.export import export_run
from hivetune.run.choices import Choices
from hivetune.run.folder import write_resolved
from hivetune.run.status import ask_to_stop, find_run
from hivetune.train.open import load_run


def make(folder: Path, name: str = "mine-abc", ended: str | None = "stopped") -> Path:
    run = folder / name
    run.mkdir(parents=True)
    write_json(run / "run.json", {"schema": 1, "name": "mine", "created": 5.0, "status": "new"})
    write_json(run / "plan.json", {"schema": 1, "steps": 20})
    with Journal(run / "metrics.jsonl") as metrics:
        for step in (1, 2):
            metrics.append("step", step=step, loss=3.0 - step / 2, tokens=100, seconds=0.5)
        metrics.append("validation", step=2, loss=2.5)
    with Journal(run / "events.jsonl") as events:
        events.append("supervisor_started")
        card = {"memory_bytes": 24 << 30, "used_bytes": 23 << 30, "temperature_c": 104.0, "watts": 300.0, "hot": True}
        events.append("sample", available_bytes=3 << 30, disk_free_bytes=9 << 30, resident_bytes=2 << 30, cards=[card])
        events.append("failure", step=1, words="the card hung and was reset", fault="device-hang")
        events.append("action", action="again", why="once may be chance")
        if ended:
            events.append("supervisor_ended", status=ended, steps=2, restarts=1, why="")
    with open_database() as database:
        database.execute("INSERT INTO runs VALUES (?, 'mine', 5.0, 'h')", (str(run),))
    return run


def test_all_runs_and_one_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    config = parse_config({"model": "smollm2-135m", "data": {"path": "rows.jsonl"}})
    write_resolved(run, config, Choices(device="cpu", dtype="float32", threads=2))
    listed = json.loads(hivetune("runs", "--json").stdout)["runs"]
    assert [(entry["run"], entry["state"], entry["step"], entry["steps"]) for entry in listed] == [
        (str(run), "stopped", 2, 20)
    ]
    shown = json.loads(hivetune("show", "mine", "--json").stdout)
    assert (shown["loss"], shown["validation_loss"], shown["tokens_per_second"]) == (2.0, 2.5, 200.0)
    assert shown["choices"] == {"device": "cpu", "dtype": "float32", "threads": 2}
    told = hivetune("show", "mine").stdout
    assert "the card hung" in told
    assert "computed in float32 (dtype: auto) on cpu" in told
    assert "3.2 GB of memory free; the worker held 2.1 GB" in told
    assert "card 0: 24.7 GB of 25.8 GB, 104 °C, 300 W (throttled by heat or power)" in told


def test_a_run_whose_supervisor_vanished_says_how_to_go_on(tmp_path: Path) -> None:
    run = make(tmp_path, ended=None)
    finished = hivetune("show", str(run), "--follow")
    assert finished.returncode == 0
    assert (
        f"interrupted, step 2 of 20, loss 2.000, validation 2.500, 1 restarts, continue it: hivetune train {run.name}"
        in (finished.stdout)
    )


def test_logs_are_the_last_lines(tmp_path: Path) -> None:
    run = make(tmp_path)
    (run / "child.log").write_text("".join(f"line {i}\n" for i in range(100)))
    assert json.loads(hivetune("show", str(run), "--log", "-n", "2", "--json").stdout)["logs"]["child.log"] == [
        "line 98",
        "line 99",
    ]


def test_runs_are_found_by_folder_name_its_beginning_and_last(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run 'last'"):
        find_run("last")
    first, second = make(tmp_path), make(tmp_path, "mine-abd")
    write_json(second / "run.json", {**json.loads((second / "run.json").read_text()), "created": 9.0})
    assert find_run(str(first)) == first and find_run("mine-abd") == second == find_run("last")
    with pytest.raises(UsageError, match="'mine-' could mean 2 runs") as caught:
        find_run("mine-")
    assert first.name in caught.value.hint and second.name in caught.value.hint
    with pytest.raises(UsageError, match="no run 'other'"):
        find_run("other")
    with pytest.raises(UsageError, match="is not a run folder"):
        find_run(str(tmp_path))


def test_a_file_beside_a_run_of_its_name_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path)
    (tmp_path / "elsewhere" / run.name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_run(run.name) == run


def test_a_run_that_holds_other_runs_is_not_deleted_with_them(tmp_path: Path) -> None:
    """The `output` of a config may lie in the folder of another run."""
    outer, inner = make(tmp_path, "outer"), make(tmp_path / "outer", "01")
    refused = hivetune("rm", str(outer), "--yes")
    assert refused.returncode == 2 and f"{outer} holds other runs: {inner}" in refused.stderr
    assert f"hivetune rm {outer} {inner}" in refused.stderr and inner.exists()
    assert hivetune("rm", str(outer), str(inner), "--yes").returncode == 0
    assert not outer.exists() and not inner.exists()


def test_a_process_elsewhere_is_not_stopped(tmp_path: Path) -> None:
    """Its number is that of another process here: in a container often 1."""
    run = make(tmp_path)
    with lock(run):
        (run / ".lock").write_text(f"{os.getpid()} a-container\n")
        with pytest.raises(UsageError, match="another container or machine"):
            ask_to_stop(run)


def test_a_run_without_its_settings_can_be_stopped(tmp_path: Path) -> None:
    run = make(tmp_path, ended=None)
    with supervisor(run) as process:
        assert hivetune("stop", str(run)).returncode == 0
        assert process.wait(30) == -signal.SIGTERM


def test_a_run_in_use_is_refused_before_any_is_deleted(tmp_path: Path) -> None:
    free, used = make(tmp_path, "a"), make(tmp_path, "b")
    with lock(used):
        refused = hivetune("rm", str(free), str(used), "--yes")
    assert refused.returncode == 75 and free.exists() and used.exists()


def test_the_unit_names_run_and_home(tmp_path: Path) -> None:
    run = make(tmp_path)
    unit = json.loads(hivetune("train", str(run), "--unit", "--json").stdout)["unit"]
    changed = json.loads(hivetune("train", str(run), "--unit", "--set", "memory_share=0.5", "--json").stdout)["unit"]
    assert f"train {run} --set memory_share=0.5" in changed
    assert f"train {run}\n" in unit and "Environment=HIVETUNE_HOME=" in unit and "TimeoutStopSec" in unit


def test_of_an_existing_run_only_where_it_works_can_be_changed(tmp_path: Path) -> None:
    finished = hivetune("train", str(make(tmp_path)), "--set", "lora.r=4")
    assert finished.returncode == 2 and "report_to, memory_share, allow" in finished.stderr


@pytest.mark.parametrize("name", ["checkpoints", ".lock", "supervisor.log", "child.log"])
def test_a_planted_run_folder_leads_nobody_out_of_it(name: str, tmp_path: Path) -> None:
    run, elsewhere = make(tmp_path), tmp_path / "elsewhere"
    (elsewhere / "000001").mkdir(parents=True)
    (elsewhere / "000001" / "precious").write_text("precious")
    (run / name).symlink_to(elsewhere if name == "checkpoints" else elsewhere / "000001" / "precious")
    doings: list[Callable[[], object]] = [
        lambda: load_run(run),  # what resume, stop, eval and gate begin with
        lambda: export_run(run, "gguf"),
        lambda: start_detached(run),
    ]
    for doing in doings:
        with pytest.raises(UsageError, match=f"{run / name} is a symbolic link"):
            doing()
    assert [path.name for path in elsewhere.iterdir()] == ["000001"]
    assert (elsewhere / "000001" / "precious").read_text() == "precious"


def test_a_unit_may_name_odd_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r"""systemd replaces %d and $x, and reads \n, within quotes too."""
    folder = tmp_path / r"a 50%d $x \n"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HIVETUNE_HOME", str(folder / "home"))
    unit = cycle_unit(Path("c%n.yaml"))
    assert rf"cycle '{tmp_path}/a 50%%d $$x \\n/c%%n.yaml'" in unit
    assert rf"Environment=HIVETUNE_HOME='{tmp_path}/a 50%%d $x \\n/home'" in unit
    assert rf"WorkingDirectory={tmp_path}/a 50%%d $x \n" in unit and "Description=Hivetune cycle of c%%n.yaml" in unit


def test_the_unit_of_a_gateway_has_its_options_wherever_json_stands(own_home: Path) -> None:
    for words in (["--json", "serve", "--unit", "--port", "9"], ["serve", "--port", "9", "--unit", "--json"]):
        assert "-m hivetune serve --port 9\n" in json.loads(hivetune(*words).stdout)["unit"]


FALLING = [(step, 4.0 - step / 100, "step") for step in range(1, 201)]


def test_a_falling_curve_falls_from_its_highest_to_its_lowest_line() -> None:
    lines = text_chart([*FALLING, (100, 3.5, "validation"), (200, 2.5, "validation")])
    rows = [line.partition("│")[2] for line in lines[:CHART_HEIGHT]]
    assert rows[0].index("·") == 0 and rows[-1].rindex("·") == CHART_WIDTH - 1
    assert sum(row.count("●") for row in rows) == 2
    assert lines[CHART_HEIGHT].endswith("step 200") and max(map(len, lines)) <= 60
    assert text_chart([]) == [] and text_chart([(3, 1.0, "validation")])
