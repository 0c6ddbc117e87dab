"""Sides that can't be compared. Those that can are in tests/cli/test_walk.py."""

import json
import shutil
from pathlib import Path

import pytest
from command import hivetune
from llama.fake_server import chat_reply, fake_server
from serve.hive import MODEL, add_release, make_home

from hivetune.base.disk import MANIFEST, home, sha256_file
from hivetune.errors import UsageError
from hivetune.judge.answers import _served
from hivetune.release.gguf import base_gguf

pytestmark = pytest.mark.slow


def test_bad_sides_are_refused_in_words(own_home: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"agent": "a", "task": "Say 1.", "output": "1"}) + "\n")
    base = base_gguf(MODEL, sha256_file(make_home() / MANIFEST), "q8_0")
    label = add_release(tmp_path, "helper", 1)

    def said(*sides: str, code: int = 2) -> str:
        done = hivetune("compare", *sides, "--rows", str(rows), "--json")
        assert done.returncode == code, done
        error = json.loads(done.stdout)["error"]
        return str(error["message"] + error["hint"])

    assert "same model" in said(label, label)
    assert "no such release" in said(label, "helper@9")
    assert "does not exist" in said(str(tmp_path / "gone.gguf"), label)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(base.read_bytes()[:-100])
    assert "truncated" in said(str(cut), label)
    adapter = next((home() / "releases" / "helper" / "1").rglob("*.gguf"))
    alone = tmp_path / "alone.gguf"
    shutil.copyfile(adapter, alone)
    assert "is an adapter of an unknown base model" in said(str(alone), label)
    raw = adapter.read_bytes()
    named = raw.index(b"llama", raw.index(b"general.architecture"))
    alone.write_bytes(raw[:named] + b"qwen2" + raw[named + 5 :])
    with pytest.raises(UsageError, match=r"does not belong to .*architecture 'qwen2', the model is 'llama'"):
        _served("x", "gguf", base, alone, None, None)
    with fake_server(lambda body: chat_reply("x", finish=None, tokens=None)) as server:
        assert "failed again and again" in said(f"{server.url}#m", label, code=4)
