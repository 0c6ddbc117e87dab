"""A model words the rows: what it brings along is rejected, what fails is skipped, what was said is not asked again."""

import json
from pathlib import Path
from typing import Any

import pytest
from serve.fake_server import Reply, fake_server, stream

from hivetune.errors import DataRefused, HivetuneError, UsageError
from hivetune.judge import answers as answers_module
from hivetune.synth.ask_rows import AskSettings, ask_rows
from hivetune.synth.packs.pack import Pack
from hivetune.synth.sources.places import Library

PAGES = Path(__file__).parent.parent / "synth" / "pages"
PACK = Pack("bees", "bees", "test", pages=("combcopy(1)", "hivectl(1)", "hive.unit(5)"))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(answers_module, "FIRST_PAUSE_S", 0.0)


def passage(body: dict[str, Any]) -> list[str]:
    """The lines of the passage that was sent."""
    text = body["messages"][-1]["content"]
    return str(text).split("PASSAGE\n")[1].rsplit("\n\n", 1)[0].splitlines()


def pair(body: dict[str, Any]) -> Reply:
    """An honest model: asks what the first line is, and answers with the others."""
    first, *others = passage(body)
    said = {"question": f"What does {first} mean?", "answer": " ".join(others) or first}
    return stream(f"Here you are:\n{json.dumps(said)}\nDone.", tokens=40)


def make(url: str, out: Path, **changes: Any) -> dict[str, Any]:
    settings = AskSettings(f"{url}#maker-1", **{"rows": 8, "seed": 0, **changes})
    return ask_rows([PACK], Library((PAGES,)), out, settings)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_name_their_model_and_their_page(tmp_path: Path) -> None:
    with fake_server(pair) as server:
        document = make(server.url, tmp_path / "a.jsonl")
    made = rows(tmp_path / "a.jsonl")
    assert document["rows"] == len(made) == 8 and document["tokens"] > 8 * 40
    for row in made:
        assert row["synth"]["maker"].endswith("#maker-1") and row["synth"]["kind"] == "asked"
        assert Path(row["synth"]["sources"][0]["file"]).is_file()


def test_what_the_passage_does_not_say_is_rejected(tmp_path: Path) -> None:
    brought = iter(
        [
            '{"question": "How do I copy it all?", "answer": "Use `--everything`."}',
            '{"question": "How fast is it?", "answer": "It copies 12345 cells."}',
            '{"question": "Where is it?", "answer": "In /opt/bees/config."}',
            '{"question": null}',
            "I'm sorry, but I can't help with that.",
            "lorem ipsum dolor",
            '{"question": ["x"], "answer": 3}',
            '{"question": "x',
        ]
    )

    def model(body: dict[str, Any]) -> Reply:
        return stream(next(brought, ""), tokens=9)

    with fake_server(model) as server, pytest.raises(DataRefused) as refused:
        make(server.url, tmp_path / "a.jsonl", rows=20)
    for reason in ("unknown-option 1", "unsupported 1", "unknown-path 1", "refused 2", "not-a-pair"):
        assert reason in refused.value.message
    assert not (tmp_path / "a.jsonl").exists()


def test_an_endpoint_that_fails_now_and_then_costs_only_those_passages(tmp_path: Path) -> None:
    bad = {"text": ""}

    def model(body: dict[str, Any]) -> Reply:
        bad["text"] = bad["text"] or passage(body)[0]
        return Reply(b"busy", "text/plain", 503) if passage(body)[0] == bad["text"] else pair(body)

    with fake_server(model) as server:
        document = make(server.url, tmp_path / "a.jsonl")
    assert document["unanswered"] == 1 and document["rows"] == 8


def test_stopped_half_way_it_goes_on_to_the_same_file(tmp_path: Path) -> None:
    left = {"replies": 5}

    def model(body: dict[str, Any]) -> Reply:
        left["replies"] -= 1
        return pair(body) if left["replies"] >= 0 else Reply(b"gone", "text/plain", 503)

    with fake_server(model) as server:
        with pytest.raises(HivetuneError, match="the 4 passages before it failed too") as stopped:
            make(server.url, tmp_path / "a.jsonl")
        assert "replies are kept" in stopped.value.hint and not (tmp_path / "a.jsonl").exists()
        left["replies"], before = 999, len(server.asked)
        document = make(server.url, tmp_path / "a.jsonl")
        assert len(server.asked) - before == document["asked_now"] < document["made"]
        make(server.url, tmp_path / "b.jsonl")
        assert len(server.asked) - before == document["asked_now"], "all was kept"
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_the_budget_ends_it_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    with fake_server(pair) as server:
        small = make(server.url, tmp_path / "a.jsonl", rows=30, budget=1000)
        assert 1000 <= small["tokens"] < 1000 + 4 * 600 and 0 < small["rows"] < 20
        asked = len(server.asked)
        large = make(server.url, tmp_path / "a.jsonl", rows=30, budget=3000)
        assert large["rows"] > small["rows"] and len(server.asked) - asked == large["asked_now"] > 0


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    for model, said in (("figures.yaml", "cannot read"), ("nothing.gguf", "is not a file")):
        with pytest.raises(UsageError, match=said):
            ask_rows([PACK], Library((PAGES,)), tmp_path / "a.jsonl", AskSettings(str(tmp_path / model), 3, 0))
