"""The Python API is documented, and the complete example of docs/python.md runs."""

import inspect
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_families import write_model

from hivetune import walk

ROOT = Path(__file__).parent.parent
# Two steps and few answers: what is tested is that the lines of the page work.
SMALL = '"max_steps": 2, "eval": {"prompts": 2, "tokens": 4}'
WORDS = ("red", "green", "blue", "north", "south", "east", "west", "iron", "silver", "copper", "river", "lake", "storm")


def test_every_station_is_documented() -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    stations = [one for one in vars(walk).values() if inspect.isfunction(one) and one.__module__ == walk.__name__]
    assert len(stations) == 11 and all(one.__doc__ and f"| `{one.__name__}(" in page for one in stations)


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
