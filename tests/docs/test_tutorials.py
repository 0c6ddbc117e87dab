"""The commands of each tutorial are run as they stand there, in their order, in an empty folder."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import hivetune
from data.models import make_family
from once import copy_of
from train.worker.models import as_source

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "tools" / "samples.py"
TUTORIALS = ["tutorial-chats", "tutorial-agent", "tutorial-csv"]
HUB = "Qwen/Qwen2.5-0.5B-Instruct"  # no test has a network: a small random model with its template stands in for it
# What a page says that a command prints.
SAYS = {
    "tutorial-chats": [
        "GitHub token in the answer (message 3); revoke it",
        "empty-turn\tthe answer has no text: fill it in",
        "messages\t-\t",
    ],
    "tutorial-agent": ["claude-code\t-\t", "\t56\tsamples/agent"],
    "tutorial-csv": [
        "question-answer\t-\tQuestion, Answer\t1\tsamples/questions.csv",
        "Ticket\t223\tT-0000\tno\t",
        "Topic\t66\targparse\tno\t",
        "Rating\t3\t3\tno\tif it rates the answer: --columns 'where=Rating in 4|5'",
    ],
}


def commands(page: str) -> list[str]:
    """The lines of all blocks that a reader is to run."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]


@pytest.fixture
def work(tmp_path: Path, own_home: Path, smollm2: Path) -> Path:
    """A reader's folder, with the repository's `tools` and the demo model at hand."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "tools").symlink_to(ROOT / "tools")
    shutil.copytree(smollm2, own_home / "models" / "smollm2-135m", copy_function=os.link)
    return work


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_source(make_family(tmp_path_factory.mktemp("hub") / "qwen", "qwen2_5"))


@pytest.mark.parametrize("page", TUTORIALS)
def test_the_look_at_the_rows(page: str, work: Path, with_tools: Path) -> None:
    """Up to the training, in this process."""
    first, *lines = commands(page)
    looks = lines[: next(n for n, line in enumerate(lines) if line.startswith("hivetune train"))]
    assert first == "python tools/samples.py samples" and len(looks) >= 3
    copy_of("samples", lambda folder: subprocess.run([sys.executable, SAMPLES, folder], check=True), work / "samples")
    printed = ""
    for line in looks:
        program, *arguments = shlex.split(line.replace(HUB, str(with_tools)))
        done = hivetune(*arguments, cwd=work)
        assert (program, done.returncode) == ("hivetune", 0), f"{line}\n{done.stdout}{done.stderr}"
        printed += done.stdout + done.stderr
    assert [words for words in SAYS[page] if words not in printed] == []


@pytest.mark.proof
@pytest.mark.parametrize("page", TUTORIALS)
def test_every_command(page: str, work: Path, with_tools: Path, record_property: Callable[..., None]) -> None:
    """With `hivetune` and `python` of this environment, as a reader has them."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    lines = [line.replace(HUB, str(with_tools)) for line in commands(page)]
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line], cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
    record_property("commands", len(lines))
