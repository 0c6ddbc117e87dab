"""The cause of a worse model: rows are blamed only where the same training without them is better."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import hivetune.cycle.acts.release as release_acts
import hivetune.cycle.acts.run as acts
from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, write_json
from hivetune.base.sealed import write_sealed
from hivetune.config import CycleConfig, RunConfig
from hivetune.cycle import pool
from hivetune.cycle.acts.slices import ActContext
from hivetune.cycle.decide import STATIONS, CycleEnd, FailedAct, OpenCycle
from hivetune.cycle.ledger import GATE, CycleRow, begin_cycle, read_replay, suspect_rows
from hivetune.cycle.observe import did_harm
from hivetune.release.registry import Release

OLD, NEW = frozenset(f"old{n}" for n in range(100)), frozenset(f"new{n}" for n in range(50))
HELD_OUT = [f"old{n}" for n in range(40)]


def settings(**others: Any) -> dict[str, Any]:
    data = {"path": "rows.jsonl", "leave_out": others.pop("leave_out", None)}
    return RunConfig(model="m", data=data, **others).model_dump(mode="json", exclude={"cycle"})


def losses(replay_gain: float) -> list[dict[str, Any]]:
    """Return the losses of the replay (`base`) and the candidate on old rows; new ones were learned by the candidate
    alone."""
    rows = []
    for n, identity in enumerate([*HELD_OUT, *(f"new{n}" for n in range(20))]):
        nll = 40.0 + n + (3 * (n % 5 - 2) + (20 * replay_gain if identity in OLD else -60.0))
        known = {"id": identity, "source": f"f:{n}", "group": identity, "tokens": 20}
        rows.append({**known, "base": 40.0 + n, "tuned": nll})
    return rows


@pytest.fixture
def refused(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replay and close a cycle of OLD and NEW rows whose candidate is worse than the champion; return the words, the
    suspects, and the rows of each training that was made."""

    def close(
        candidate: dict[str, Any],
        champion: dict[str, Any],
        behind: frozenset[str] = OLD,
        *,
        gain: float = 0.3,
        failed: FailedAct | None = None,
        spent_hours: float = 0.0,
        end: CycleEnd = "refused",
    ) -> tuple[str, set[str], list[Any]]:
        release = Release("demo", 1, "/run", "m", "base", "adapter", "snapshot", "deploy", {}, 0.0)
        write_json(release.folder / MANIFEST, {"settings": champion})
        cycle = CycleRow("c1", "demo", 1.0, "rows", {}, "/pool", "demo@1")
        write_sealed(cycle.folder / GATE, {"parts": {"best": {"verdict": "abort"}}, "adapter_sha256": "worse"})
        made: list[Any] = []

        def replay_run(context: ActContext, run: Any, kept: frozenset[str]) -> Any:
            made.append(kept)
            return SimpleNamespace(
                folder=Path("/replay"), snapshot=SimpleNamespace(pool=lambda: [SimpleNamespace(id=i) for i in kept])
            )

        monkeypatch.setattr(pool, "releases", lambda database, name: [release])
        monkeypatch.setattr(pool, "rows_behind", lambda database, release: behind)
        monkeypatch.setattr(acts, "_replay_run", replay_run)
        monkeypatch.setattr(acts, "slice_of", lambda context, run: "trained")
        monkeypatch.setattr(acts, "compared_losses", lambda run, sides, progress: losses(gain))
        monkeypatch.setattr(acts, "read_record", lambda run: {"identity": {"settings": candidate, "model": "base"}})
        for module in (acts, release_acts):
            monkeypatch.setattr(module, "rows_of", lambda cycle: OLD | NEW)
        opened = OpenCycle("c1", done=frozenset(STATIONS[:4]), passed=False, spent_hours=spent_hours)
        context = SimpleNamespace(
            config=SimpleNamespace(cycle=CycleConfig(name="demo", hours=8.0)),
            now=2.0,
            details={},
            cycle=lambda: cycle,
            run=lambda: SimpleNamespace(folder=Path("/run"), model=Path("/base")),
            observed=SimpleNamespace(open=opened, failed=failed),
            progress=lambda label: lambda done, total: None,
        )
        monkeypatch.setattr(release_acts, "ending", lambda *_: (end, "the gate refused it"))
        with open_database() as database:
            begin_cycle(database, cycle)
            if failed is None:
                assert did_harm(cycle, False, "") and not read_replay(cycle)
                acts.replay_training(cast(ActContext, context))
                assert read_replay(cycle)
            words = release_acts.close_cycle(cast(ActContext, context))
            return words, set(suspect_rows(database, "demo")), made

    return close


def test_rows_are_suspect_where_the_same_training_without_them_is_better(refused: Any) -> None:
    words, suspects, made = refused(settings(leave_out="c1.jsonl"), settings(leave_out="c0.jsonl"))
    assert made == [OLD]
    assert suspects == NEW and "50 rows that came with it are set aside as suspect" in words
    assert "since a training without them is better: gain 0.3, 95 % interval 0.2" in words
    assert "hivetune cycle now" in words and "hivetune cycle admit" in words


def test_rows_without_which_the_model_is_as_bad_are_not_blamed(refused: Any) -> None:
    words, suspects, made = refused(settings(), settings(), gain=0.02)
    assert made and not suspects
    assert "its rows are not blamed, since a training without them is not shown to be better: gain 0.02, 95 %" in words


def test_no_row_is_blamed_where_the_replay_failed(refused: Any) -> None:
    failed = FailedAct("replay", 1, 1.0, "no row is left to train on", final=True)
    words, suspects, made = refused(settings(), settings(), failed=failed)
    assert not made and not suspects
    assert words.endswith("not blamed, since no training without them succeeded: no row is left to train on")


def test_a_replay_keeps_to_the_budget(refused: Any) -> None:
    words, suspects, made = refused(settings(), settings(), spent_hours=4.5)
    assert not made and not suspects and words.endswith("the budget has no room for a second training, without them")


def test_a_candidate_that_another_took_the_place_of_is_replayed_again(refused: Any) -> None:
    refused(settings(), settings())
    cycle = CycleRow("c1", "demo", 1.0, "rows", {}, "/pool", "demo@1")
    write_sealed(cycle.folder / GATE, {"parts": {"best": {"verdict": "abort"}}, "adapter_sha256": "another"})
    assert did_harm(cycle, False, "") and not read_replay(cycle)


@pytest.mark.parametrize(
    ("passed", "withdrawn", "champion", "verdict", "harm"),
    [
        (False, "", "demo@1", "abort", True),
        (False, "", None, "abort", False),
        (False, "", "demo@1", "iterate", False),
        (True, "", "demo@1", "deploy", False),
        (True, "slow", "demo@1", "deploy", True),
        (None, "", "demo@1", "abort", False),  # judged against another champion
    ],
)
def test_what_counts_as_harm(
    own_home: Path, passed: bool | None, withdrawn: str, champion: str | None, verdict: str, harm: bool
) -> None:
    cycle = CycleRow("c1", "demo", 1.0, "rows", {}, "/pool", champion)
    write_sealed(cycle.folder / GATE, {"parts": {"best": {"verdict": verdict}}})
    assert did_harm(cycle, passed, withdrawn) is harm


def test_a_shorter_training_by_the_persons_own_setting_blames_no_row(refused: Any) -> None:
    """As seen in use: a champion of 18 steps, a candidate of 12, and 50 ordinary rows."""
    words, suspects, made = refused(settings(max_steps=12), settings(max_steps=18))
    assert not suspects and not made
    assert words.endswith(
        "its rows are not blamed, since the champion was trained otherwise (max_steps: 18 there, 12 here)"
    )


def test_more_rows_in_as_many_steps_blame_no_row(refused: Any) -> None:
    words, suspects, made = refused(settings(max_steps=18), settings(max_steps=18))
    assert not suspects and not made and "each row was read less often" in words


def test_rows_that_the_champion_had_and_the_candidate_had_not_may_be_what_is_missing(refused: Any) -> None:
    more = OLD | {f"gone{n}" for n in range(10)}
    words, suspects, made = refused(settings(), settings(), more)
    assert not suspects and not made and "10 of the champion's 110 rows were left out" in words
