"""TensorBoard's event file: written here, read by TensorBoard itself, cut anywhere, and continued."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import float32, make_run, make_steps, points_in, take_back
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard_reader import read_by_tensorboard

from hivetune.base.disk import write_json
from hivetune.dashboard.exporters.follow import Destination, report_once
from hivetune.dashboard.exporters.tensorboard import (
    HPARAMS_TAG,
    LoggedEvent,
    first_record,
    read_records,
    record_of,
    text_part,
)
from hivetune.run.folder import EXPORTS, VERDICT

EVENTS = st.lists(
    st.builds(
        LoggedEvent,
        st.floats(0, 4e9),
        st.integers(0, 1 << 40),
        st.dictionaries(st.sampled_from(["train/loss", "validation/loss", "ä"]), st.floats(width=32, allow_nan=False)),
        parts=st.dictionaries(st.just("run/ü"), st.text().map(lambda text: text_part("run/ü", text))),
    ),
    max_size=6,
)


@given(events=EVENTS, cut=st.integers(0, 10_000))
def test_what_was_written_is_read_up_to_where_it_was_cut(events: list[LoggedEvent], cut: int) -> None:
    records = [first_record(1.5), *(record_of(event) for event in events)]
    data = b"".join(records)
    cut %= len(data) + 1
    read = list(read_records(data[:cut]))
    whole = sum(1 for n in range(1, len(records) + 1) if len(b"".join(records[:n])) <= cut)
    assert [event for event, _ in read[1:]] == events[: max(0, whole - 1)]
    assert [end for _, end in read] == [len(b"".join(records[: n + 1])) for n in range(whole)]


@given(events=EVENTS, where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_ends_the_file_there_and_is_never_a_value(
    events: list[LoggedEvent], where: int, bit: int
) -> None:
    records = [first_record(1.5), *(record_of(event) for event in events)]
    data = bytearray(b"".join(records))
    data[where % len(data)] ^= 1 << bit
    read = [event for event, _ in read_records(bytes(data))]
    assert read[1:] == events[: max(0, len(read) - 1)]
    assert len(read) < len(records)


def test_a_value_beyond_float32_is_infinite_as_in_a_cast() -> None:
    [(event, _)] = read_records(record_of(LoggedEvent(1.0, 1, {"train/loss": -1e300})))
    assert event.values == {"train/loss": -math.inf}


def test_tensorboard_reads_what_the_journal_says_also_of_steps_that_were_made_again(tmp_path: Path) -> None:
    run, destination = make_run(tmp_path), Destination("tensorboard", str(tmp_path / "tb"))
    make_steps(run, 1, 25)
    assert report_once(run, destination).sent == 27
    assert report_once(run, destination).sent == 0
    take_back(run, 12)
    make_steps(run, 13, 30, shift=0.5)
    report = report_once(run, destination)
    assert (report.points, report.sent) == (33, 20)
    assert read_by_tensorboard(tmp_path / "tb") == pytest.approx(float32(points_in(run)))


def test_a_torn_file_is_gone_on_with(tmp_path: Path) -> None:
    """TensorBoard stops reading at a torn record, so what is appended behind one would never be seen."""
    run, destination = make_run(tmp_path), Destination("tensorboard", str(tmp_path / "tb"))
    make_steps(run, 1, 20)
    report_once(run, destination)
    [path] = (tmp_path / "tb").glob("*/*")
    ends = [end for event, end in read_records(path.read_bytes()) if event.values]
    path.write_bytes(path.read_bytes()[: ends[-1] - 7])
    make_steps(run, 21, 22)
    assert report_once(run, destination).sent == 3  # the validation at 20, which was torn, and the new ones
    assert read_by_tensorboard(path.parent).keys() == points_in(run).keys()


def test_runs_of_one_name_are_runs_of_their_own(tmp_path: Path) -> None:
    """Every cycle trains in a folder called `run`."""
    for night in ("one", "two"):
        (tmp_path / night).mkdir()
        run = make_run(tmp_path / night)
        make_steps(run, 1, 5)
        report_once(run, Destination("tensorboard", str(tmp_path / "tb")))
    folders = sorted((tmp_path / "tb").iterdir())
    assert len(folders) == 2
    assert all(len(read_by_tensorboard(folder)) == 5 for folder in folders)


def test_settings_verdict_and_files_arrive_and_what_comes_later_too(tmp_path: Path) -> None:
    run, destination = make_run(tmp_path), Destination("tensorboard", str(tmp_path / "tb"))
    make_steps(run, 1, 5)
    report_once(run, destination)
    metric = {"name": "loss", "difference": -0.25}
    unknown = {"name": "success", "difference": None}
    write_json(run / VERDICT, {"schema": 1, "verdict": "deploy", "metrics": [metric, unknown]})
    (run / EXPORTS).mkdir()
    (run / EXPORTS / "model.gguf").touch()
    assert report_once(run, destination).sent == 0
    [folder] = (tmp_path / "tb").iterdir()
    read = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in read.Tensors("run/outcome")]
    assert "deploy" not in texts[0] and all(word in texts[-1] for word in ("deploy", "-0.25", "model.gguf"))
    assert "| model | " in read.Tensors("run/settings")[0].tensor_proto.string_val[0].decode()
    content = read.SummaryMetadata(HPARAMS_TAG).plugin_data.content
    started = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert started.hparams["model"].string_value and started.hparams["epochs"].number_value == 3
    size = next(folder.iterdir()).stat().st_size
    report_once(run, destination)
    assert next(folder.iterdir()).stat().st_size == size, "what is there is not written again"
