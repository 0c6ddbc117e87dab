"""Runs of stage 2 by the real loop on a tiny model: it begins where stage 1 ended, resumes to the same bits, drops a
bad row that is not finite, and stops before good rows are lost."""

from pathlib import Path

import pytest
import torch
from hivetune.train.supervise.verify import excerpt_of
from safetensors.torch import load_file, save_file
from train.worker.planted import BAD, TAIL, Bench, judged_by_feedback, make_bench, planted_rows, right
from train.worker.runs import stop_after

from hivetune.base.disk import read_json
from hivetune.base.journal import read_journal
from hivetune.errors import UsageError
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat
from hivetune.train.plan.steps import read_plan
from hivetune.train.worker.model.adapter import read_adapter

NAN = 95  # a token that no other row has

SETTINGS = {"learning_rate": 1e-3, "learn": {"steps": 15}}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Stage 1 is trained; a third of its answers have the tail."""
    rows, rated = planted_rows(0)
    rows += judged_by_feedback(rated, [not row.has_tail for row in rated])
    better = next(number for number, row in enumerate(rows) if row.liked and row.split == "train")
    worse = rows[better]._replace(answer=(*rows[better].answer[:-1], *TAIL, 2), split=BAD, better=better, liked=False)
    made = make_bench(tmp_path_factory.mktemp("bench"), [*rows, worse])
    made.train("stage1", epochs=14, patience=None)
    return made


def said(bench: Bench, name: str, event: str) -> list[dict]:
    return [entry for entry in read_journal(bench.folder / name / "metrics.jsonl") if entry["event"] == event]


def weights(bench: Bench, name: str) -> bytes:
    return (bench.folder / name / "adapter_model.safetensors").read_bytes()


def stopping(after: int) -> Heartbeat:
    heartbeat = Heartbeat(None)
    ask, steps = stop_after(after), 0

    def beat(beat: Beat) -> None:
        nonlocal steps
        steps += beat is Beat.ITEM
        ask(heartbeat, steps)

    heartbeat.beat = beat  # type: ignore[method-assign]
    return heartbeat


def test_the_tail_goes_and_good_rows_stay(bench: Bench) -> None:
    outcome = bench.stage2("two", "stage1", **SETTINGS)
    test = [row for row in bench.rows if row.split == "test"]
    before, after = (right(test, bench.answers(name)).count(False) / len(test) for name in ("stage1", "two"))
    assert before > 0.2 and after < 0.05
    assert outcome["status"] == "done" and outcome["adapter_step"] == outcome["steps"] == 15
    losses = bench.losses("two")
    assert len(losses) == 6 and max(losses) <= losses[0] + 0.02
    steps = said(bench, "two", "step")
    assert all(step["bad_loss"] > 0 for step in steps) and steps[0]["rows"] == 24


def test_the_reference_is_the_adapter_that_it_begins_with(bench: Bench) -> None:
    bench.stage2("reference", "stage1", learning_rate=1e-3, learn={"steps": 1}, warmup=1)
    known = read_json(bench.folder / "reference" / "reference.json")["nll"]
    plan = read_plan(bench.folder / "reference")
    bad = [row for row in plan.steps[0].rows if bench.rows[row].split == BAD]
    assert len(bad) == 8 and all(known[str(row)] > 0 for row in bad)
    alone = [row for row in bad if bench.rows[row].better is None]
    # Every gain is 0 at step 0: each bad row alone is worth lambda * n * 2 / beta, however many there are.
    step = said(bench, "reference", "step")[0]
    expected = sum(0.5 * len(bench.rows[row].answer) * 2 / 5 for row in alone) / plan.steps[0].trained_tokens
    if len(alone) == len(bad):
        assert step["bad_loss"] == pytest.approx(expected, rel=1e-5)  # rounding of fp32 sums of other batches
    assert step["loss"] > 0


@pytest.mark.parametrize("after", [1, 7])
def test_stopped_and_resumed_is_the_same_run_bit_for_bit(bench: Bench, after: int) -> None:
    if not (bench.folder / "calm").exists():
        bench.stage2("calm", "stage1", **SETTINGS)
    name = f"stopped-{after}"
    assert bench.stage2(name, "stage1", heartbeat=stopping(after), **SETTINGS)["status"] == "stopped"
    assert bench.stage2(name, "stage1", **SETTINGS)["status"] == "done"
    assert weights(bench, name) == weights(bench, "calm")


def test_a_run_that_loses_good_rows_stops_and_keeps_what_was_within(bench: Bench) -> None:
    """A rate at which the adapter breaks."""
    outcome = bench.stage2("broken", "stage1", learning_rate=0.3, learn={"steps": 15, "weight": 1.0}, clip=0)
    assert outcome["stopped_early"] and outcome["steps"] < 15 and outcome["adapter_step"] == 0
    assert "rose from" in said(bench, "broken", "stopped_early")[0]["reason"]
    kept, start = (read_adapter(bench.folder / name)[1] for name in ("broken", "stage1"))
    assert all(torch.equal(kept[name], start[name]) for name in start)


def test_bad_rows_never_push_more_than_half_of_what_good_rows_pull(bench: Bench) -> None:
    from hivetune.train.worker.model.protocol import read_documents
    from hivetune.train.worker.stage2 import Stage2

    better = {one.row: one.better for one in bench.snapshot.bad_rows()}
    rows = [*bench.snapshot.rows("train")[:2], *list(better)[:12]]
    found = Stage2(better, {}, 1.0, 5.0).judge(read_documents(bench.snapshot, rows))
    good = sum(int(d.trained_L.sum()) for d in found if d.bad is None)
    push = sum(d.bad.weight * int(d.trained_L.sum()) for d in found if d.bad is not None)
    assert push == pytest.approx(good / 2)


def test_a_stage_2_without_a_start_is_refused(bench: Bench) -> None:
    with pytest.raises(UsageError, match=r"lora\.start"):
        bench.train("none", learn={"stage": 2})


def test_a_bad_row_that_is_not_finite_is_quarantined(tmp_path: Path) -> None:
    rows, rated = planted_rows(1, unlabelled=60, rated=60, held_out=20)
    rows += judged_by_feedback(rated, [not row.has_tail for row in rated])
    poisoned = next(number for number, row in enumerate(rows) if row.split == BAD)
    rows[poisoned] = rows[poisoned]._replace(prompt=(1, NAN, *rows[poisoned].prompt[2:]))
    bench = make_bench(tmp_path, rows)
    tensors = load_file(bench.model / "model.safetensors")
    tensors["model.embed_tokens.weight"][NAN] = torch.nan
    save_file(tensors, bench.model / "model.safetensors", metadata={"format": "pt"})
    bench.train("stage1", max_steps=2)
    outcome = bench.stage2("two", "stage1", learning_rate=1e-4, learn={"steps": 6})
    assert outcome["status"] == "done" and outcome["steps"] == 6
    assert {row for entry in said(bench, "two", "quarantined") for row in entry["rows"]} == {poisoned}
    assert all(row != poisoned for step in read_plan(bench.folder / "two").steps[1:] for row in step.rows)


def test_an_excerpt_of_a_snapshot_keeps_who_is_compared_with_whom(bench: Bench, tmp_path: Path) -> None:
    """`verify-resume` trains such a one."""
    (pair,) = [one for one in bench.snapshot.bad_rows() if one.better is not None]
    excerpt = excerpt_of(bench.snapshot, [7, pair.row, 5, pair.better], tmp_path / "excerpt")
    (found,) = excerpt.bad_rows()
    assert (found.row, found.better) == (1, 3)
    assert bytes(excerpt.tokens(3)) == bytes(bench.snapshot.tokens(pair.better))
