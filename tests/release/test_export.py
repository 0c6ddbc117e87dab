"""What an export writes and says of itself, on a full disk, in a copied home and through `llama-quantize`."""

import json
import os
import shutil
from pathlib import Path

import pytest
from programs import write_program
from serve.hive import MODEL, make_home, write_adapter
from small_disk import fill

from hivetune.base.disk import MANIFEST, home, write_json, write_manifest
from hivetune.cli.output import explain
from hivetune.errors import DoesNotFit, HivetuneError, UsageError
from hivetune.llama.backend import ServerSettings, open_backend
from hivetune.models.gguf_header import read_header
from hivetune.release.export import export_run

pytestmark = pytest.mark.slow


def make_run(run: Path) -> Path:
    """A run of the tiny model, as far as an export reads it."""
    model = make_home()
    write_adapter(model, run, 1)
    rows = {"rows_in": 1297, "trained": 1234, "held_out": 56, "rejected": {"no answer": 3, "broken": 4}}
    known = {"schema": 1, "name": "mine", "created": 0.0, "status": "done", "model": str(model), "home": str(home())}
    write_json(run / "run.json", known | {"result": {"rows": rows}})
    return run


@pytest.fixture
def run(own_home: Path, tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def test_a_folder_has_a_portable_base_and_a_card(run: Path, tmp_path: Path) -> None:
    """Nothing in it names a path of this machine."""
    model = home() / "models" / MODEL
    described = json.loads((model / "hivetune.json").read_text())
    (model / "hivetune.json").write_text(json.dumps({**described, "name": MODEL, "source": str(tmp_path)}))
    write_manifest(model)
    config = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path)}))
    write_json(run / "eval.json", {"verdict": "deploy", "reasons": ["loss gained 0.2 nats"]})
    made = export_run(run, "adapter")
    for path in made.folder.rglob("*"):
        assert path.is_dir() or str(tmp_path) not in path.read_bytes().decode("latin-1"), path
    assert json.loads((made.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == MODEL
    card = (made.folder / "README.md").read_text()
    assert card.startswith(f'---\nbase_model: "{MODEL}"\nlibrary_name: "peft"\n')
    said = ("Rows: 1,297 read, 1,234 trained, 56 held out", "Verdict: deploy", "PeftModel.from_pretrained(base, .)")
    assert all(words in card for words in (*said, f"Licence: that of {MODEL}"))


def test_a_template_that_prints_todays_date_gets_that_of_training(run: Path) -> None:
    """Only GGUF files had it: transformers and vLLM rendered another prompt than was trained."""
    model = home() / "models" / MODEL
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    write_manifest(model)
    for to in ("adapter", "merged"):
        text = (export_run(run, to).folder / "chat_template.jinja").read_text()
        assert text.startswith('{{ "26 Jul 2024" }}') and "<|im_start|>" in text, to


@pytest.mark.parametrize(("to", "room_bytes"), [("adapter", 8 << 10), ("merged", 60 << 10), ("gguf", 60 << 10)])
def test_a_disk_that_fills_while_it_exports(to: str, room_bytes: int, small_disk: Path, own_home: Path) -> None:
    """The documented exit code, and no half-made file. In this process and in a child: the first of its files fit, the
    weights do not."""
    run = make_run(small_disk / "run")
    (run / "export").mkdir()
    taken = fill(small_disk)
    os.truncate(taken, taken.stat().st_size - room_bytes)
    with pytest.raises((OSError, HivetuneError), match="No space left on device") as caught:
        export_run(run, to)
    told = caught.value if isinstance(caught.value, HivetuneError) else explain(caught.value)
    assert (type(told), told.hint) == (DoesNotFit, "free some space, then run the same command again")
    assert "the disk is full" in told.message
    assert [path.name for path in (run / "export").iterdir()] == [".lock"]


def test_an_export_in_a_copied_home_does_not_write_into_the_originals_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run outside of the home has one folder, which both homes name."""
    original = home()
    shutil.copytree(original, tmp_path / "copy")
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "copy"))
    with pytest.raises(UsageError, match="belongs to the home") as refused:
        export_run(run, "adapter")
    assert f"HIVETUNE_HOME={original} hivetune export" in refused.value.hint and not (run / "export").exists()
    monkeypatch.setenv("HIVETUNE_HOME", str(original))
    assert export_run(run, "adapter").made and (run / "export/adapter" / MANIFEST).is_file()
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "copy"))
    assert not export_run(run, "adapter").made, "what is there may be read"


def test_a_file_of_four_bits_is_made_from_sixteen_and_served(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No package that tests may install has `llama-quantize`, so one of 24 lines stands in. It really writes Q4_0 and
    Q5_0 by llama.cpp's own Python functions, which have no K-quants: q4_k_m and its like were not tried."""
    program = write_program(
        tmp_path / "bin" / "llama-quantize", Path(__file__).with_name("llama_quantize.py").read_text()
    )
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    exported = export_run(run, "gguf", quant="Q4_0")
    names = sorted(path.name for path in exported.folder.iterdir())
    assert names == ["Modelfile", "README.md", "manifest.json", "mine-q4_0.gguf"]
    shapes = read_header(exported.path).tensors
    weights = sum(a * b for a, b in (shape for shape in shapes.values() if len(shape) == 2))
    assert exported.path.stat().st_size < 0.8 * weights + 200_000, "4.5 bits a weight, and the vocabulary"
    with open_backend(exported.path, ServerSettings(context_tokens=256)) as backend:
        assert backend.complete([{"role": "user", "content": "hello"}], max_tokens=2).new_tokens
    with pytest.raises(UsageError, match="llama-quantize can't write q4_k_m: main: this llama-quantize does not know"):
        export_run(run, "gguf", quant="q4_k_m")
    assert [path.name for path in (run / "export").iterdir() if path.name[0] != "."] == ["gguf-q4_0"]
