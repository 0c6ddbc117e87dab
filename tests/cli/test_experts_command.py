"""A family on the command line when files of it are gone, and when a person takes an expert out of service."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command import hivetune

from hivetune.base.database import open_database
from hivetune.base.disk import sha256_file, write_json, write_manifest
from hivetune.release.registry import desired, find, promote, register
from hivetune.routing.choose import SpecialistTable, served_table, write_table
from hivetune.routing.domains import RowDomain
from hivetune.routing.steps import SpecialistStep, add_steps, newest_steps

EXPERT = "team-billing"
Call = Callable[..., tuple[int, Any]]


def add_champion(work: Path, name: str) -> None:
    """A release as far as the registry and the gateway's list read it: nothing is loaded here."""
    run = work / name
    exported = run / "export" / "gguf-adapter"
    exported.mkdir(parents=True)
    (exported / "lora.gguf").write_bytes(b"GGUF")
    (run / "adapter_config.json").write_text("{}")
    (run / "adapter_model.safetensors").write_text(name)
    (run / "config.resolved.yaml").write_text("config: {}\n")
    write_json(run / "run.json", {"name": name})
    sha256 = sha256_file(run / "adapter_model.safetensors")
    write_manifest(exported, {"adapter_sha256": sha256})
    about = {"model": "m", "model_sha256": "0" * 64, "adapter_sha256": sha256, "snapshot": "s", "verdict": "deploy"}
    with closing(open_database()) as database:
        release, _ = register(database, run, name, {**about, "proof": {}}, by="test")
        promote(database, release.label, by="test", reason="test")


@pytest.fixture
def family(tmp_path: Path, own_home: Path) -> Path:
    """A shared release and the expert of Billing; the table was written from rows that have no such agent any more."""
    for name in ("team", EXPERT):
        add_champion(tmp_path, name)
    with closing(open_database()) as database:
        add_steps(
            database, SpecialistStep("team", RowDomain("agent", ("Billing",)), "serving", "planted", EXPERT, "parent")
        )
    write_table(SpecialistTable("team", (EXPERT,), {"agent": {"clerk": ""}}))
    config = tmp_path / "my.yaml"
    config.write_text(f"model: smollm2-135m\ndata: {{path: {tmp_path}/rows.jsonl}}\nexperts: {{shared: team}}\n")
    return config


@pytest.fixture
def document() -> Call:
    """A command with `--json`: its exit code and its document."""

    def call(*arguments: str) -> tuple[int, Any]:
        done = hivetune(*arguments, "--json")
        return done.returncode, json.loads(done.stdout)

    return call


def test_a_key_belongs_to_the_adapter_and_not_to_the_rows_of_today(family: Path, document: Call) -> None:
    for agent in ("billing", "Billing"):
        assert document("route", "any", "--agent", agent)[1]["name"] == EXPERT


@pytest.mark.parametrize("gone", ["adapter_model.safetensors", ""])
def test_one_missing_file_is_reported_and_nobody_is_routed_to_it(family: Path, document: Call, gone: str) -> None:
    with closing(open_database()) as database:
        folder = find(database, EXPERT).folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700)
    (folder / gone).unlink() if gone else shutil.rmtree(folder)
    code, known = document("experts", str(family))
    assert code == 0 and known["experts"] and f"hivetune registry retire {EXPERT}" in known["problems"][0]
    code, choice = document("route", "any", "--agent", "billing")
    assert (code, choice["name"], choice["by"]) == (0, "team", "shared")
    assert f"{EXPERT}@1" in choice["problems"][0]


def test_an_expert_is_taken_out_of_service_by_hand_and_brought_back(family: Path, document: Call) -> None:
    code, refused = document("rollback", EXPERT)
    assert code == 2 and f"hivetune registry retire {EXPERT}" in refused["error"]["hint"]
    assert document("retire", EXPERT, "--reason", "wrong prices")[0] == 0
    assert document("route", "any", "--agent", "billing")[1]["name"] == "team"
    with closing(open_database()) as database:
        step = newest_steps(database, "team")[EXPERT]
        assert (step.step, step.reason) == ("retired", "wrong prices") and EXPERT not in desired(database)
        assert document("retire", EXPERT)[0] == 2  # it has no champion
        promote(database, f"{EXPERT}@1", by="test", reason="test")
        assert served_table(database, "team").keys["agent"]["billing"] == EXPERT
