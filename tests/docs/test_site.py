"""The documentation builds as a site that asks nobody else for anything; the Containerfiles hold to the rules."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_site_builds_and_every_link_of_it_leads_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")
    }
    sources = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {f"{name}.html" for name in sources} <= pages.keys()
    loaded = re.compile(r"<(?:script|img|iframe|link rel=.stylesheet.)[^>]*(?:src|href)=.(https?:)?//")
    assert [name for name, text in pages.items() if loaded.search(text)] == []


@pytest.mark.parametrize("name", ["cpu", "rocm"])
def test_a_containerfile_is_clean_and_runs_as_nobody_special(name: str) -> None:
    path = ROOT / "containers" / f"{name}.Containerfile"
    done = subprocess.run([Path(sys.executable).parent / "hadolint", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = path.read_text(encoding="utf-8")
    assert "\nUSER 1000\n" in text
    assert 'ENTRYPOINT ["hivetune"]' in text
