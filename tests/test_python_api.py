"""What `import hivetune` offers: types, lazy imports, and the complete example of docs/python.md, which is run."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_families import write_model

import hivetune
from hivetune import walk

ROOT = Path(__file__).parent.parent
# Two steps and few answers: what is tested is that the lines of the page work.
SMALL = '"max_steps": 2, "eval": {"prompts": 2, "tokens": 4}'
WORDS = ("red", "green", "blue", "north", "south", "east", "west", "iron", "silver", "copper", "river", "lake", "storm")


def test_importing_it_imports_nothing_else() -> None:
    script = "import hivetune, sys; print(hivetune.__version__, [m for m in sys.modules if m.startswith('hivetune.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == [hivetune.__version__, "[]\n"]


def test_every_name_is_a_function_with_types_and_documented() -> None:
    stub = (ROOT / "src/hivetune/__init__.pyi").read_text(encoding="utf-8")
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    assert (ROOT / "src/hivetune/py.typed").exists()
    script = "import hivetune; print(*(getattr(hivetune, name).__module__ for name in hivetune.__all__))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"hivetune.walk"}
    for name in hivetune.__all__:
        assert vars(walk)[name].__doc__
        assert f"import {name} as {name}\n" in stub
        assert f"| `{name}(" in page
    assert not hasattr(hivetune, "no_such_name")


def test_no_import_of_a_folder_takes_the_place_of_a_function() -> None:
    """The types of what `train` returns and of what `serve` is given are in folders of these names."""
    script = (
        "from hivetune.train.open import Run; from hivetune.serve.run import GatewaySettings; import hivetune\n"
        "print(hivetune.train.__module__, hivetune.serve.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "hivetune.walk hivetune.walk\n"


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.DOTALL | re.MULTILINE)
    write_model(tmp_path / "model", "llama")
    draw = random.Random(0)
    rows = [{"prompt": " ".join(draw.choices(WORDS, k=8)), "completion": draw.choice(WORDS)} for _ in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "example.py").write_text(example.replace("smollm2-135m", "model").replace('"epochs": 1', SMALL))
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=580
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"^60 rows, \d+ usable$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("helpdesk@1\n")
