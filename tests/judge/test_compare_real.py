"""Two releases, a GGUF file and an endpoint, on a tiny model served by llama.cpp."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import hivetune
from llama.fake_server import chat_reply, fake_server
from serve.hive import MODEL, add_release, make_home

from hivetune.base.disk import MANIFEST, home, sha256_file
from hivetune.errors import UsageError
from hivetune.judge.artefacts import _served
from hivetune.release.gguf import base_gguf

pytestmark = pytest.mark.slow


def compare(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = hivetune("compare", *arguments, "--json")
    assert done.stdout.count("\n") == 1, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    lines = [
        {"agent": "ab"[i % 2], "task": f"Say {i}.", "output": f"{i}", "checker": {"name": "regex", "pattern": "."}}
        for i in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "rows.jsonl")


def test_any_against_any(own_home: Path, tmp_path: Path, rows: str) -> None:
    labels = [add_release(tmp_path, "helper", seed) for seed in (1, 2)]
    options = ("--rows", rows, "--set", "eval.tokens=6")
    code, document = compare(*labels, *options)
    assert code == 0, document
    assert document["problems"] == [] and len(document["answers"]) == 8
    metrics = {metric["name"]: metric for metric in document["metrics"]}
    assert metrics["success"]["n"] == 8 and metrics["latency_s"]["n"] == 8
    assert metrics["latency_s"]["base"] > 0 and metrics["loss"]["base"] is None
    for side, label in zip(("base", "tuned"), labels, strict=True):
        assert document[side]["label"] == label and document[side]["peak_memory_bytes"] > 10e6
    texts = [[answer[side]["answer"] for answer in document["answers"]] for side in ("base", "tuned")]
    assert texts[0] != texts[1]

    base = base_gguf(MODEL, sha256_file(make_home() / MANIFEST), "q8_0")
    with fake_server(lambda body: chat_reply("I am here")) as server:
        code, other = compare(f"{server.url}#m", labels[1], *options)
        assert code == 0 and len(server.asked) == 8 + 1
    assert [answer["tuned"]["answer"] for answer in other["answers"]] == texts[1]  # kept, not asked again
    assert other["base"]["peak_memory_bytes"] is None and other["base"]["kind"] == "endpoint"
    code, third = compare(str(base), labels[0], *options)
    assert code == 0 and third["base"]["kind"] == "gguf"
    assert [answer["tuned"]["answer"] for answer in third["answers"]] == texts[0]


def test_bad_sides_are_refused_in_words(own_home: Path, tmp_path: Path, rows: str) -> None:
    base = base_gguf(MODEL, sha256_file(make_home() / MANIFEST), "q8_0")
    label = add_release(tmp_path, "helper", 1)

    def said(*arguments: str) -> str:
        code, document = compare(*arguments, "--rows", rows)
        assert code == 2, document
        return str(document["error"]["message"] + document["error"]["hint"])

    assert "same model" in said(label, label)
    assert "no such release" in said(label, "helper@9")
    assert "is not a file" in said(str(tmp_path / "gone.gguf"), label)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(base.read_bytes()[:-100])
    assert "truncated" in said(str(cut), label)
    adapter = next((home() / "releases" / "helper" / "1").rglob("*.gguf"))
    alone = tmp_path / "alone.gguf"
    shutil.copyfile(adapter, alone)
    assert "is an adapter: its base: the model is not named" in said(str(alone), label)
    raw = adapter.read_bytes()
    named = raw.index(b"llama", raw.index(b"general.architecture"))
    alone.write_bytes(raw[:named] + b"qwen2" + raw[named + 5 :])
    with pytest.raises(UsageError, match=r"does not belong to .*architecture 'qwen2', the model is 'llama'"):
        _served("x", "gguf", base, alone, None, None)
    with fake_server(lambda body: chat_reply("x", finish=None, tokens=None)) as server:
        code, document = compare(f"{server.url}#m", label, "--rows", rows)
    assert code == 4 and "failed again and again" in document["error"]["message"]
