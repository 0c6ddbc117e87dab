"""Whatever happens to the journal and to the exporter: a tool holds the journal's points, once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import make_run, make_steps, points_in, take_back

from hivetune.base.journal import Journal
from hivetune.dashboard.exporters.points import JournalReader, first_difference, missing, point_of, subject_of
from hivetune.dashboard.exporters.tensorboard import TensorBoard


@pytest.mark.parametrize(
    "entry",
    [
        {"event": "started", "time": 1.0, "step": 3},
        {"event": "step", "time": 1.0, "step": 3, "loss": None, "grad_norm": None},  # it had lost all its rows
        {"event": "damaged", "time": 0.0, "line": 2},
    ],
)
def test_what_is_no_point(entry: dict[str, object]) -> None:
    assert point_of(entry) is None


def test_a_step_has_its_values_by_the_names_that_tools_show() -> None:
    entry = {"event": "step", "time": 7.25, "step": 3, "loss": 2.0, "grad_norm": 0.5, "lr": 1e-4, "tokens": 90}
    point = point_of({**entry, "seconds": 0.5})
    assert point is not None
    assert (point.step, point.time_ms) == (3, 7250)
    assert point.values == {
        "train/loss": 2.0,
        "train/grad_norm": 0.5,
        "train/learning_rate": 1e-4,
        "train/tokens_per_second": 180.0,
    }


def test_the_reader_goes_on_where_it_was_and_leaves_a_torn_line_for_later(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    reader = JournalReader(run / "metrics.jsonl")
    assert reader.read() == ([], False)
    make_steps(run, 1, 3)
    new, replaced = reader.read()
    assert ([point.step for point in new], replaced) == ([1, 2, 3], False)
    line = b'{"event": "step", "time": 1.0, "step": 4, "loss": 1.0, "seconds": 1.0}\n'
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(line[:20])
        file.flush()
        assert reader.read() == ([], False)
        file.write(line[20:])
    assert [point.step for point in reader.read()[0]] == [4]
    take_back(run, 2)
    make_steps(run, 3, 3)
    new, replaced = reader.read()
    assert ([point.step for point in new], replaced) == ([1, 2, 3], True)
    assert sorted(step for _, step in reader.points) == [1, 2, 3]


def test_a_damaged_line_costs_its_own_point_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    make_steps(run, 1, 3)
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2, "loss": 2', b'"step": 2, "loss": 9'))
    assert [point.step for point in JournalReader(path).read()[0]] == [1, 3]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("crash"), st.integers(0, 12)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("kill"), st.integers(0, 60)),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS)
def test_an_event_file_holds_what_the_journal_says_whatever_was_killed(
    actions: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`crash`: the worker goes back some steps. `kill`: the exporter dies with some bytes of its file unwritten."""
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder, folder.name)
    subject, step = subject_of(run), 0
    sink, reader = TensorBoard(subject, str(folder / "tb")), JournalReader(run / "metrics.jsonl")
    for name, amount in [*actions, ("kill", 0), ("send", 0)]:
        if name == "steps":
            make_steps(run, step + 1, step + amount, shift=step / 1000, validate_every=3)
            step += amount
        elif name == "crash" and step:
            step = max(0, step - amount)
            take_back(run, step)
        elif name == "send":
            _send(sink, reader)
        elif name == "kill":
            size = sink.path.stat().st_size
            with open(sink.path, "r+b") as file:
                file.truncate(max(0, size - amount))
            sink, reader = TensorBoard(subject, str(folder / "tb")), JournalReader(run / "metrics.jsonl")
    said = points_in(run, "time") if (run / "metrics.jsonl").exists() else {}
    assert sink.held() == {key: round(time_s * 1000) for key, time_s in said.items()}
    again = TensorBoard(subject, str(folder / "tb"))
    assert again.held() == sink.held()


def _send(sink: TensorBoard, reader: JournalReader) -> None:
    """Do what `Exporter.send` does, without its process."""
    reader.read()
    held = sink.held()
    step = first_difference(held, reader.points)
    if step is not None:
        held = sink.take_back(step, held)
    sink.add(missing(held, reader.points.values()))


def test_the_newest_line_of_a_step_counts(tmp_path: Path) -> None:
    """The journal is of a version that did not take lines back."""
    run = make_run(tmp_path)
    with Journal(run / "metrics.jsonl") as metrics:
        metrics.append("step", step=1, loss=3.0, time=1.0)
        metrics.append("step", step=1, loss=2.0, time=2.0)
    reader = JournalReader(run / "metrics.jsonl")
    reader.read()
    assert reader.points["step", 1].values["train/loss"] == 2.0
