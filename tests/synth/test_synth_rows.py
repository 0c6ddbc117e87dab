"""Rows made of pages: what they say is on the page, they are shared out, drawn from a seed, and not made twice."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from extraction import options_named, options_without_source, plain_source, rows_of

from hivetune.data.frozen import frozen_hashes
from hivetune.errors import DataRefused
from hivetune.synth.packs import Library, Pack, WrittenFact
from hivetune.synth.questions import KIND_WEIGHTS
from hivetune.synth.rows import DRAFT_REASONS, make_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(
    hive_pack: Pack, library: Library, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("made") / "rows.jsonl"
    return make_rows([hive_pack], library, out, rows=45, seed=0), list(rows_of(out))


def test_every_row_has_a_source_and_names_no_option_without_one(made: Any) -> None:
    document, rows = made
    assert len(rows) == document["rows"] == 45
    named = 0
    for row in rows:
        assert row["category"] == "bees" and row["synth"]["sources"] and row["synth"]["seed"] == 0
        assert row["synth"]["maker"] == "templates"
        assert all(Path(one["file"]).is_file() and one["page"] for one in row["synth"]["sources"])
        assert options_without_source(row) == set()
        named += len(options_named(row["messages"][1]["content"]))
    assert named > 20


def test_the_extraction_of_this_test_finds_what_is_invented(made: Any) -> None:
    _, rows = made
    row = next(row for row in rows if row["synth"]["sources"][0]["page"] == "combcopy(1)")
    invented = {**row, "messages": [{"role": "assistant", "content": "Or use `--all-combs`."}]}
    assert options_without_source(invented) == {"--all-combs"}
    assert "--all-cells" in plain_source(Path(row["synth"]["sources"][0]["file"]))


def test_every_kind_is_made_and_the_counts_add_up(made: Any) -> None:
    document, rows = made
    kinds = Counter(row["synth"]["kind"] for row in rows)
    assert kinds.keys() == KIND_WEIGHTS.keys() - {"fact"}
    (category,) = document["categories"]
    assert category["kinds"] == dict(sorted(kinds.items())) and category["kept"] == kinds.total()
    assert category["skipped"] == {"nothing is documented in a form that is understood": 1}
    assert set(document["rejected"]) <= set(DRAFT_REASONS)


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


def test_the_same_seed_gives_the_same_file(hive_pack: Pack, library: Library, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_rows([hive_pack], library, tmp_path / name, rows=40, seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_categories_share_the_rows_and_an_empty_one_gives_its_share(
    hive_pack: Pack, library: Library, tmp_path: Path
) -> None:
    one = replace(hive_pack, category="copy", pages=("combcopy(1)",), documents=())
    two = replace(hive_pack, category="key", pages=("combkey(1)",), documents=())
    none = Pack(category="nothing", title="nothing", install="hives", pages=("nothing(1)",))
    document = make_rows([one, two, none], library, tmp_path / "rows.jsonl", rows=12, seed=0)
    kept = {c["category"]: c["kept"] for c in document["categories"]}
    assert kept == {"copy": 9, "key": 3, "nothing": 0}
    assert document["categories"][2]["install"] == "hives"


def test_frozen_questions_are_not_made(
    hive_pack: Pack, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    make_rows([hive_pack], library, out, rows=20, seed=0)
    frozen = tmp_path / "frozen.jsonl"
    frozen.write_text(out.read_text())
    hashes = frozen_hashes([str(frozen)])
    monkeypatch.setattr("hivetune.synth.rows.frozen_hashes", lambda: hashes)
    asked = {row["messages"][0]["content"] for row in rows_of(out)}
    document = make_rows([hive_pack], library, out, rows=20, seed=0)
    assert not asked & {row["messages"][0]["content"] for row in rows_of(out)}
    assert document["rejected"]["frozen-question"] >= 15


def test_a_fact_is_checked_against_the_page_that_it_names(hive_pack: Pack, library: Library, tmp_path: Path) -> None:
    asked = "Which option of combcopy stops early?"
    good = WrittenFact(asked, "`--limit=NUM` stops after NUM cells.", "combcopy(1)")
    wrong = WrittenFact(asked, "`--max-cells` stops after NUM cells.", "combcopy(1)")
    lost = WrittenFact(asked, "`--limit` does.", "combpaste(1)")
    pack = replace(hive_pack, fact=(good, wrong, lost))
    document = make_rows([pack], library, tmp_path / "rows.jsonl", rows=20, seed=0)
    facts = [row for row in rows_of(tmp_path / "rows.jsonl") if row["synth"]["kind"] == "fact"]
    assert [row["messages"][1]["content"] for row in facts] == [good.answer]
    assert document["rejected"]["unknown-option"] == 1 and document["rejected"]["no-source"] == 1


def test_nothing_to_read_is_refused_and_leaves_the_old_file(library: Library, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("old\n")
    with pytest.raises(DataRefused, match="no row could be made"):
        make_rows([Pack(category="nothing", install="hives", pages=("nothing(1)",))], library, out, rows=9, seed=0)
    assert out.read_text() == "old\n" and [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
