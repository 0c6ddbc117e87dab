"""The commands on rows as scripts and people see them: one document, exit codes, files."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import hivetune
from data.conftest import chat

from hivetune.cli.rows import report_text
from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check

PAGES = Path(__file__).parent.parent / "synth" / "pages"


@pytest.fixture
def mixed(write_rows: Callable[..., Path]) -> Path:
    rows = [chat(f"What is {i}?", f"The number after {i - 1}.") for i in range(9)]
    return write_rows([*rows, "no json"])


def test_check_prints_one_document_in_the_form_of_the_contract(mixed: Path) -> None:
    finished = hivetune("check", mixed, "--json")
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert (document["schema"], document["rows_in"], document["usable"], document["duplicates"]) == (1, 10, 9, 0)
    assert (document["rejected"], document["set_aside"]) == ({"bad-json": 1}, {})
    [problem] = document["problems"]
    assert (problem["source"], problem["reason"]) == (f"{mixed}:10", "bad-json") and problem["hint"]
    assert "template" in hivetune("check", mixed).stdout
    refused = hivetune("check", mixed, "--set", "data.max_rejected=0.05", "--json")
    assert (refused.returncode, json.loads(refused.stdout)["usable"]) == (3, 9)
    assert "max_rejected" in refused.stderr


@pytest.mark.parametrize("name", ["two\nlines", "a\x1b[31mred", "tab\tbed", "back\rwards"])
def test_a_file_name_is_one_line_of_what_can_be_seen(name: str, tmp_path: Path) -> None:
    spelled = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(chat("What is it?", "A bee.")) + "\nno json\n")
    for path in (tmp_path / f"{name}.jsonl", tmp_path / f"{name}-missing.jsonl"):
        finished = hivetune("check", path)
        said = finished.stdout + finished.stderr
        assert name not in said and str(tmp_path / spelled) in said
        assert all(c.isprintable() or c in "\n\t" for c in said)


def test_check_with_everything(write_rows: Callable[..., Path], chatml: Path, tmp_path: Path) -> None:
    """What is written is for its user alone, whatever the umask."""
    rows = [{"q": f"What is {i}?", "a": f"The number after {i - 1}."} for i in range(20)]
    clean = tmp_path / "out" / "clean.jsonl"
    before = os.umask(0)
    try:
        finished = hivetune(
            "check", write_rows([*rows, {"q": "x"}]), "--model", chatml, "--columns", "prompt=q,completion=a",
            "--set", "max_length=40", "--clean", clean,
        )  # fmt: skip
    finally:
        os.umask(before)
    assert finished.returncode == 0, finished.stderr
    assert "unknown-layout" in finished.stdout
    assert len(clean.read_text().splitlines()) == 20
    assert len((tmp_path / "out" / "clean.quarantine.jsonl").read_text().splitlines()) == 1
    assert not [path for path in (clean.parent, *clean.parent.rglob("*")) if path.stat().st_mode & 0o077]


def test_rows_with_the_same_words_take_one_line(tmp_path: Path) -> None:
    empty, secret = {"prompt": "Where?", "completion": ""}, "use ghp_" + "a1B2" * 9
    rows = [*(chat(f"What is {i}?", f"{secret} {i}") for i in range(3)), *([empty] * 40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = hivetune("check", path, "--set", "data.near_duplicates=0")
    told = [line for line in finished.stdout.splitlines() if line.startswith(str(path))]
    assert told[0] == f"{path}:1\t3\tredacted-secret\tGitHub token in the answer (message 2); revoke it"
    assert told[1].startswith(f"{path}:4\t40\tempty-turn\t")


def test_a_possible_mapping_is_shown_with_rows_as_it_reads_them(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("frage;antwort\n" + "".join(f"Wo ist {n}?;In {name} {n}.\n" for n in range(5)))
    told = "\n".join(
        text for text in report_text(check(DataConfig(path=str(tmp_path))).document) if isinstance(text, str)
    )
    assert "a.csv and 1 more file: unknown layout" in told
    assert '  --columns prompt=frage,completion=antwort\n    "Wo ist 0?" -> "In a.csv 0."\n' in told


@pytest.mark.slow
def test_collecting_with_nohup_goes_on_when_the_terminal_closes(tmp_path: Path) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text(json.dumps(chat("one?", "1")) + "\n")
    command = ["nohup", sys.executable, "-m", "hivetune", "collect", "--follow", log, "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as collecting:
        assert collecting.stdout is not None and json.loads(collecting.stdout.readline())["stored"] == 1
        collecting.send_signal(signal.SIGHUP)
        with open(log, "a") as file:
            file.write(json.dumps(chat("two?", "2")) + "\n")
        assert json.loads(collecting.stdout.readline())["stored"] == 2
        collecting.terminate()
        collecting.communicate(timeout=60)
    assert collecting.returncode == 143


@pytest.mark.slow
def test_synth_writes_rows_that_are_checked_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANPATH", str(PAGES))
    pack, out = tmp_path / "bees.toml", tmp_path / "rows.jsonl"
    pack.write_text('category = "bees"\npages = ["combcopy(1)", "hivectl(1)"]\n')
    words = ["synth", str(pack), "--out", str(out), "--rows", "20"]
    document = json.loads(hivetune(*words, "--json").stdout)
    assert (document["schema"], document["rows"], document["maker"]) == (1, 20, "templates")
    told = hivetune(*words).stdout
    assert "bees\t20" in told and "20 rows, all synthetic" in told
    checked = json.loads(hivetune("check", out, "--json").stdout)
    assert checked["rejected"] == {} and checked["rows_in"] == 20 and checked["categories"]["bees"]
    found = {one["category"]: one for one in json.loads(hivetune("synth", "--json").stdout)["categories"]}
    assert len(found) == 24 and found["python"]["pages"] > 50 and "policycoreutils" in found["selinux"]["install"]
    refused = hivetune("synth", "sytemd", "--out", out)
    assert refused.returncode == 2 and "did you mean 'systemd'?" in refused.stderr
    pack.write_text('category = "bees"\npages = ["nothing(1)"]\ninstall = "hives"')
    refused = hivetune("synth", pack, "--out", out)
    assert refused.returncode == 3 and "install documentation: hives" in refused.stderr
