"""Rows made of pages: what they say is on the page, they are shared out, drawn from a seed, and not made twice."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from extraction import options_named, options_without_source, plain_source, rows_of

from hivetune.data.frozen import frozen_hashes
from hivetune.errors import DataRefused
from hivetune.synth.keep import Against
from hivetune.synth.make.draft import DRAFT_KINDS
from hivetune.synth.maker import TEMPLATES, make_rows
from hivetune.synth.packs.pack import Pack, WrittenFact
from hivetune.synth.report import synth_document
from hivetune.synth.sources.places import Library


def synthesize(
    packs: list[Pack], places: Library, out: Path, *, rows: int, seed: int, against: Sequence[str] = ()
) -> dict[str, Any]:
    """Make the rows; return the report."""
    compared = Against(against)
    counts = make_rows(packs, places, out, rows=rows, seed=seed, against=compared)
    return synth_document(packs, counts, out, rows=rows, seed=seed, maker=TEMPLATES, against=compared)


@pytest.fixture
def made(hive_pack: Pack, places: Library, tmp_path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    document = synthesize([hive_pack], places, tmp_path / "rows.jsonl", rows=60, seed=0)
    return document, list(rows_of(tmp_path / "rows.jsonl"))


def test_every_row_has_a_source_and_names_no_option_without_one(made: Any) -> None:
    document, rows = made
    assert len(rows) == document["rows"] == 60
    named = 0
    for row in rows:
        assert row["category"] == "bees" and row["synth"]["sources"] and row["synth"]["seed"] == 0
        assert row["synth"]["maker"] == "templates" and "options" in row["synth"]["checks"]
        assert all(Path(one["file"]).is_file() and one["page"] for one in row["synth"]["sources"])
        assert options_without_source(row) == set()
        named += len(options_named(row["messages"][1]["content"]))
    assert named > 20


def test_the_extraction_of_this_test_finds_what_is_invented(made: Any) -> None:
    _, rows = made
    row = next(row for row in rows if row["synth"]["sources"][0]["page"] == "combcopy(1)")
    row["messages"][-1]["content"] += " Or use `--all-combs`."
    assert options_without_source(row) == {"--all-combs"}
    assert "--all-cells" in plain_source(Path(row["synth"]["sources"][0]["file"]))


def test_many_kinds_are_made_and_the_counts_add_up(made: Any) -> None:
    document, rows = made
    kinds = Counter(row["synth"]["kind"] for row in rows)
    assert kinds.keys() >= {
        "meaning",
        "which",
        "command",
        "mistake",
        "follow-up",
        "concept",
        "explain",
    }
    assert kinds.keys() >= {"unsaid", "purpose", "compare"}
    (category,) = document["categories"]
    assert category["kinds"] == dict(sorted(kinds.items()))
    assert category["made"] == category["kept"] + sum(category["rejected"].values()) + category["not_needed"]
    assert category["not_needed"] >= 0
    assert category["skipped"] == {"alias of another page": 1, "nothing is documented in a form that is understood": 1}


def test_a_value_is_no_placeholder_and_what_is_invented_is_only_asked(made: Any) -> None:
    _, rows = made
    said = json.dumps(rows)
    assert "--order=PATH" not in said, "path is a value of --order, not what stands for one"
    wrong = [row for row in rows if "absent" in row["synth"]]
    assert wrong
    for row in wrong:
        (option,) = row["synth"]["absent"]
        assert option in row["messages"][0]["content"] and option not in row["messages"][1]["content"]
        assert option not in plain_source(Path(row["synth"]["sources"][0]["file"]))


def test_the_same_seed_gives_the_same_file(hive_pack: Pack, places: Library, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        synthesize([hive_pack], places, tmp_path / name, rows=40, seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_weights_share_the_rows_out_and_an_empty_category_gives_its_share(
    hive_pack: Pack, places: Library, tmp_path: Path
) -> None:
    one = replace(hive_pack, category="ctl", pages=("hivectl(1)",), documents=(), weight=1)
    two = replace(hive_pack, category="copy", pages=("combcopy(1)",), documents=(), weight=2)
    none = Pack("nothing", "nothing", "test", install="hives", pages=("nothing(1)",), weight=5)
    document = synthesize([one, two, none], places, tmp_path / "rows.jsonl", rows=30, seed=0)
    assert {c["category"]: c["kept"] for c in document["categories"]} == {"ctl": 10, "copy": 20, "nothing": 0}
    assert document["empty"] == ["nothing"] and document["categories"][2]["install"] == "hives"


def test_more_than_there_is_gives_all_there_is_without_copies(hive_pack: Pack, places: Library, tmp_path: Path) -> None:
    document = synthesize([hive_pack], places, tmp_path / "rows.jsonl", rows=5000, seed=0)
    rows = list(rows_of(tmp_path / "rows.jsonl"))
    assert 100 < document["rows"] == len(rows) < 5000
    assert len({json.dumps(row["messages"]) for row in rows}) == len(rows)


def test_a_kind_that_a_pack_does_not_want_is_not_waited_for(hive_pack: Pack, places: Library, tmp_path: Path) -> None:
    """More rows are asked for than the other kinds give: all of those, and an end."""
    pack = replace(hive_pack, kinds={kind: 0.0 for kind in DRAFT_KINDS if kind != "compare"})
    document = synthesize([pack], places, tmp_path / "rows.jsonl", rows=5000, seed=0)
    (category,) = document["categories"]
    assert set(category["kinds"]) == {"compare"} and 0 < document["rows"] < 5000
    assert category["not_needed"] > 0


def test_rows_that_are_there_are_not_made_again(hive_pack: Pack, places: Library, tmp_path: Path) -> None:
    """Held-out rows as well as trained ones."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    synthesize([hive_pack], places, first, rows=30, seed=0)
    (tmp_path / "broken.jsonl").write_text("{not a row\n")
    document = synthesize(
        [hive_pack], places, second, rows=30, seed=0, against=[str(first), str(tmp_path / "broken.jsonl")]
    )
    assert (document["compared_with"], document["not_comparable"]) == (30, 1)
    questions = [{row["messages"][0]["content"] for row in rows_of(path)} for path in (first, second)]
    assert not questions[0] & questions[1] and document["rejected"]["duplicate"] == 30


def test_frozen_questions_are_not_made(
    hive_pack: Pack, places: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    synthesize([hive_pack], places, out, rows=20, seed=0)
    frozen = tmp_path / "frozen.jsonl"
    frozen.write_text(out.read_text())
    hashes = frozen_hashes([str(frozen)])
    monkeypatch.setattr("hivetune.synth.keep.frozen_hashes", lambda: hashes)
    document = synthesize([hive_pack], places, out, rows=20, seed=0)
    assert document["rejected"]["frozen-question"] >= 15  # those of one turn


def test_a_fact_is_checked_against_the_page_that_it_names(hive_pack: Pack, places: Library, tmp_path: Path) -> None:
    good = WrittenFact("Which option of combcopy stops early?", "`--limit=NUM` stops after NUM cells.", "combcopy(1)")
    wrong = WrittenFact("Which option of combcopy stops early?", "`--max-cells` stops after NUM cells.", "combcopy(1)")
    lost = WrittenFact("Which option of combcopy stops early?", "`--limit` does.", "combpaste(1)")
    pack = replace(hive_pack, facts=(good, wrong, lost), kinds={kind: 0.0 for kind in ("meaning", "which")})
    document = synthesize([pack], places, tmp_path / "rows.jsonl", rows=20, seed=0)
    facts = [row for row in rows_of(tmp_path / "rows.jsonl") if row["synth"]["kind"] == "fact"]
    assert [row["messages"][1]["content"] for row in facts] == [good.answer]
    assert document["rejected"]["unknown-option"] == 1 and document["rejected"]["no-source"] == 1
    assert not {"meaning", "which"} & {row["synth"]["kind"] for row in rows_of(tmp_path / "rows.jsonl")}


def test_nothing_to_read_is_refused_and_leaves_the_old_file(places: Library, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("old\n")
    with pytest.raises(DataRefused, match="no row could be made"):
        synthesize([Pack("nothing", "", "test", install="hives", pages=("nothing(1)",))], places, out, rows=9, seed=0)
    assert out.read_text() == "old\n" and [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
