"""Experts of planted domains on a tiny model: born where styles conflict, found by key and by text, else not."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from specialists.planted import SHARED, config_of, domain, keep, share, shuffled_agents, without_processes

from hivetune.base.database import open_database
from hivetune.config import RunConfig
from hivetune.cycle.acts.run import look_for_experts
from hivetune.cycle.acts.slices import ActContext
from hivetune.cycle.decide import Observation, Permission
from hivetune.release.registry import desired, find, retire
from hivetune.routing.choose import not_looked_at, read_table
from hivetune.routing.steps import specialist_steps
from hivetune.specialists.station import propose_specialists, train_specialists
from hivetune.train.open import load_run

pytestmark = pytest.mark.slow
ROWS = 300


@pytest.fixture(autouse=True)
def here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        without_processes(patch)
        yield


def test_conflicting_styles_with_a_cue(own_home: Path, tmp_path: Path) -> None:
    """From rows to served experts; once more, which changes nothing; a new shared adapter; an expert that is gone."""
    rows = domain("coder", "brief", ROWS, cue="code") + domain("tester", "formal", ROWS, cue="test")
    rows += domain("novice", "list", 30, cue="odd")
    config = config_of(tmp_path, rows)
    shared = share(config, tmp_path / "shared")
    assert not_looked_at(shared)
    made = train_specialists(config)
    steps = {step.domain.values[0]: step for step in made.steps}
    assert {name: step.step for name, step in steps.items()} == {
        "coder": "serving",
        "tester": "serving",
        "novice": "too-small",
    }
    assert all(step.parent == shared.adapter_sha256 for step in steps.values())
    assert made.routed is not None and not made.changes and not made.problems
    gains = {one.domain: one for one in made.routed.by_key}
    assert gains["agent=coder"].gain > 0.1 and gains["agent=coder"].better
    assert gains["agent=tester"].gain > 0.1 and gains["agent=tester"].better
    assert not any(one.worse for one in (*made.routed.by_key, *made.routed.by_text))
    table = read_table(SHARED)
    assert table is not None and table.keys["agent"] == {
        "coder": f"{SHARED}-coder",
        "tester": f"{SHARED}-tester",
        "novice": "",
    }
    assert not not_looked_at(shared) and not list((own_home / "experts" / SHARED).rglob("fork-*"))
    with closing(open_database()) as database:
        before = specialist_steps(database, SHARED)
        assert [step.step for step in before].count("born") == 2
        assert desired(database).keys() == {SHARED, f"{SHARED}-coder", f"{SHARED}-tester"}
    assert look_again(config) == "1 too-small, 2 serving"
    with closing(open_database()) as database:
        assert specialist_steps(database, SHARED) == before
        coder = find(database, f"{SHARED}-coder")
    new = keep(load_run(Path(coder.run)), SHARED)  # the old coder is the new shared adapter: it has caught up there
    assert not_looked_at(new)
    changes = {step.specialist: step for step in train_specialists(config).changes}
    assert changes[coder.name].step == "retired" and "caught up" in changes[coder.name].reason
    assert changes[f"{SHARED}-tester"].step == "serving"
    assert changes[f"{SHARED}-tester"].parent == new.adapter_sha256
    with closing(open_database()) as database:
        # Its domain may get a new one over the new shared adapter: 40 more steps gain enough on some processors.
        assert desired(database).get(coder.name) != coder.version
        retire(database, f"{SHARED}-tester", by="test", reason="gone")
    assert [problem for problem in train_specialists(config).problems if f"{SHARED}-tester can't serve" in problem]
    table = read_table(SHARED)
    assert table is not None and f"{SHARED}-tester" not in table.specialists


def look_again(config: RunConfig) -> str:
    """As the cycle does it."""
    context = ActContext(config, SHARED, Observation(), "test", Permission, 0.0)
    return look_for_experts(context)


def test_shuffled_labels_give_no_expert(own_home: Path, tmp_path: Path) -> None:
    rows = domain("coder", "brief", ROWS, cue="code") + domain("tester", "formal", ROWS, cue="test")
    config = config_of(tmp_path, shuffled_agents(rows, seed=1))
    share(config, tmp_path / "shared")
    made = propose_specialists(config)
    assert {step.step for step in made.steps} <= {"nothing-left", "not-born", "not-enough-evidence"}
    assert len(made.steps) == 2
