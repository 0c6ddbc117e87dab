"""What an exported folder says of itself, and that it names no path of this machine."""

import json
from pathlib import Path

import pytest
from serve.hive import MODEL, make_home, write_adapter

from hivetune.base.disk import write_manifest
from hivetune.release.export import Source, export


@pytest.mark.slow
def test_a_folder_has_a_portable_base_and_a_card(tmp_path: Path) -> None:
    model = make_home()
    described = json.loads((model / "hivetune.json").read_text())
    (model / "hivetune.json").write_text(json.dumps({**described, "name": MODEL, "source": str(tmp_path)}))
    write_manifest(model)
    run = tmp_path / "run"
    write_adapter(model, run, 1)
    config = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path)}))
    rows = {"rows_in": 1297, "trained": 1234, "held_out": 56, "rejected": {"no answer": 3, "broken": 4}}
    (run / "run.json").write_text(json.dumps({"result": {"rows": rows}}))
    (run / "eval.json").write_text(json.dumps({"verdict": "deploy", "reasons": ["loss gained 0.2 nats"]}))
    made = export(Source(run, model, "helpdesk", run=run), tmp_path / "export", "adapter")
    for path in made.folder.rglob("*"):
        assert str(tmp_path) not in path.read_bytes().decode("latin-1"), path
    assert json.loads((made.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == MODEL
    card = (made.folder / "README.md").read_text()
    assert card.startswith(f'---\nbase_model: "{MODEL}"\nlibrary_name: "peft"\n')
    for words in (
        "read: 1,297 rows",
        "trained: 1,234 rows",
        "rejected: 7 rows",
        "Verdict: deploy",
        "loss gained 0.2 nats",
        "## Licence",
    ):
        assert words in card
