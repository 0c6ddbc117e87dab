"""Domains: which values have one, which rows are theirs, and a whole one beside its shared champion."""

from contextlib import closing
from pathlib import Path

import pytest
import yaml
from cycle.small import KilledLoop, append_rows, make_config, make_rows
from cycle.test_rows import row, rows

from hivetune.base.database import open_database
from hivetune.config import CycleConfig, RunConfig, parse_config
from hivetune.cycle.domains import Domain, domains_of
from hivetune.cycle.record import cycles_of
from hivetune.cycle.rows import choose_rows
from hivetune.data.snapshot import PoolRow
from hivetune.release.registry import releases
from hivetune.serve.route import Domain as Served
from hivetune.serve.route import wanted


def of(agent: str | None, train: int, held_out: int, first: int) -> list[PoolRow]:
    trained = rows(train, first, agent=agent)
    return [*trained, *rows(held_out, first + train, agent=agent, split="test")]


def by_agent() -> RunConfig:
    config = parse_config({"model": "m", "data": {"path": "x"}}, "test")
    return config.model_copy(update={"cycle": CycleConfig(name="desk", by="agent")})


def test_values_with_enough_rows_have_a_domain() -> None:
    found = [
        *of("Billing  Team", 200, 20, 0),
        *of("it", 300, 30, 1000),
        *of("few", 199, 20, 2000),
        *of("unheard", 200, 19, 3000),
        *of("模型", 200, 20, 4000),  # no name of a release
        *of("a b", 200, 20, 5000),
        *of("a-b", 200, 20, 6000),  # the same name
        *of(None, 500, 50, 7000),
    ]
    domains = domains_of(by_agent(), found)
    assert [(domain.name, domain.value) for domain in domains] == [
        ("desk-billing-team", "billing team"),
        ("desk-it", "it"),
    ]
    assert {domain.shares for domain in domains} == {2}


def test_rows_of_other_domains_are_left_out_on_both_sides_of_the_split() -> None:
    mine, others = of("IT", 3, 2, 0), of("billing", 3, 2, 10)
    left_out = choose_rows([*mine, *others], (), None, Domain("desk", "agent", "it"))
    assert left_out == {one.id: "other-domain" for one in others}
    own = row(50, agent="it", split="test", answered_by="desk@1")
    assert choose_rows([own], (), None, Domain("desk", "agent", "it")) == {own.id: "own-evidence"}


@pytest.mark.slow
def test_a_domain_is_trained_from_the_shared_champion_and_served_where_it_is_better(
    own_home: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path, by="agent")
    settings = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**settings, "learning_rate": 0.003}))
    asked = make_rows(0, 320)
    append_rows(tmp_path / "rows.jsonl", [{**one, "agent": "Billing Team"} for one in asked[:270]])
    append_rows(tmp_path / "rows.jsonl", [{**one, "agent": "it"} for one in asked[270:]])
    loop = KilledLoop(config, tmp_path / "log")
    loop.once([])
    with closing(open_database()) as database:
        (shared,), (domain,) = cycles_of(database, "demo"), cycles_of(database, "demo-billing-team")
        known = releases(database, "demo-billing-team")
        served = wanted(database, ("demo",))
    assert shared.end == "promoted" and domain.champion == "demo@1", loop.log.read_text()
    assert domain.end in ("promoted", "refused"), domain.reason
    if domain.end == "promoted":
        assert known[0].proof["domain"] == {"of": "demo", "by": "agent", "value": "billing team"}
        assert served.domains == {"demo": (Served("demo-billing-team", "agent", "billing team"),)}
        assert served.champions == {"demo": "demo@1", "demo-billing-team": "demo-billing-team@1"}
    loop.once([])
    with closing(open_database()) as database:
        assert len(cycles_of(database, "demo-billing-team")) == 1, loop.log.read_text()
