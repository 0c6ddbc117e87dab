"""The loop as users run it, with a tiny real model and real kills: a cycle, a domain that is served, poisoned rows."""

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from cycle.small import (
    NAME,
    Kill,
    KilledLoop,
    append_rows,
    make_config,
    make_rows,
    poisoned,
    summary,
)
from serve.hive import gateway, make_home
from train.planned import vouch

from hivetune.base.database import open_database
from hivetune.base.documents import read_document
from hivetune.cycle.record import cycles_of
from hivetune.release.registry import releases

pytestmark = pytest.mark.slow

TEAM, OTHERS, POISONED = 270, 130, 60
DOMAIN = f"{NAME}-billing-team"
TOLERANCE = 0.02  # of the gate, in nats per token


def of_team(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an agent that answers otherwise, which nothing but its name tells."""
    asked, answer = row["messages"]
    text = " ".join(reversed(answer["content"].split()))
    return {**row, "agent": "Billing Team", "messages": [asked, {**answer, "content": text}]}


def harm(run: Path) -> float:
    """Return how many nats per token a candidate is worse than the champion of its time, on clean held-out rows."""
    rows = read_document(run.parent / "against-champion.json")["rows"]
    clean = [row for row in rows if int(row["source"].rpartition(":")[2]) <= TEAM + OTHERS]
    assert len(clean) >= 10
    return sum(row["tuned"] - row["base"] for row in clean) / sum(row["tokens"] for row in clean)


def test_a_cycle_its_domain_and_a_poisoned_night(own_home: Path, tmp_path: Path) -> None:
    """Nothing is lost or done twice, every row is accounted for, no promotion is harmful, and what declares the domain
    is answered by it."""
    config, file = make_config(tmp_path, by="agent"), tmp_path / "rows.jsonl"
    vouch(make_home(), "float32")
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "learning_rate": 0.003}))
    killed = KilledLoop(config, tmp_path / "log", forked=True)
    append_rows(file, [of_team(row) for row in make_rows(0, TEAM)])
    append_rows(file, [{**row, "agent": "it"} for row in make_rows(TEAM, OTHERS)])
    borders = (("opened", ""), ("begin", "train"), ("end", "judge"), ("begin", "promote"))
    killed.once([Kill(border) for border in borders])
    with closing(open_database()) as database:
        (domain,) = cycles_of(database, DOMAIN)
        (release,) = releases(database, DOMAIN)
    assert (domain.end, domain.champion) == ("promoted", f"{NAME}@1"), killed.log.read_text()[-3000:]
    assert release.proof["domain"] == {"of": NAME, "by": "agent", "value": "billing team"}
    append_rows(file, [{**row, "agent": "it"} for row in poisoned(make_rows(TEAM + OTHERS, POISONED))])
    killed.once([Kill(("begin", "judge"))])
    assert killed.made.total() == 5
    found = summary()
    assert [counts["rows_in"] for counts in found["rows"]] == [TEAM + OTHERS, TEAM + OTHERS + POISONED]
    with closing(open_database()) as database:
        first, second = cycles_of(database, NAME)
    assert first.end == "promoted" and second.end in ("promoted", "refused")
    assert second.end == "refused" or harm(second.run) < TOLERANCE
    assert second.end != "refused" or f"new since {NAME}@1: {POISONED} of " in second.reason
    done = Counter((entry["cycle"], entry["station"]) for entry in killed.lines() if entry.get("outcome") == "done")
    # The kill at a promotion's begin may come when the alias has moved and its end is not written yet.
    assert {count for (_, station), count in done.items() if station != "promote"} == {1}
    (champion,) = (label for label, *_, aliases in found["releases"] if "champion" in aliases)
    with gateway(tmp_path / "gateway.log") as running:
        asked = {"model": NAME, "messages": [{"role": "user", "content": "What comes after small red?"}]}
        for headers, label in (({}, champion), ({"X-Hivetune-Agent": "Billing  TEAM"}, release.label)):
            with running.client(**headers) as client:
                answer = client.post("/v1/chat/completions", json={**asked, "max_tokens": 4})
            assert (answer.status_code, answer.headers["x-hivetune-release"]) == (200, label)
