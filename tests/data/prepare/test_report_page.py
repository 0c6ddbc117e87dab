"""The report's page: it names the model and each place, and can be read on a narrow screen."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from data.conftest import chat

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check

TOKEN = "ghp_" + "a1B2" * 9
# Whether the page scrolls sideways, and the smallest label of its plots, in pixels of the screen.
PROBE = """<script>
const labels = [...document.querySelectorAll("svg text")].map(text => text.getBoundingClientRect().height);
document.title = [document.documentElement.scrollWidth, innerWidth, Math.min(...labels)].join(" ");
</script>"""


def make_page(write_rows: Callable[..., Path], model: Path | None, tmp_path: Path) -> str:
    rows = [chat(f"question {i} " * (1 + i % 7), f"answer {i} " * (1 + i), agent=f"agent-{i % 3}") for i in range(60)]
    rows[41] = chat("How do I log in?", f"With {TOKEN}, as always.")
    page = tmp_path / "report.html"
    path = write_rows(rows, "a_long_name_without_any_break_" * 3 + ".jsonl")
    check(DataConfig(path=str(path)), model_folder=model, page=page)
    return page.read_text()


def test_it_names_the_model_and_where_each_secret_stood(
    write_rows: Callable[..., Path], chatml: Path, tmp_path: Path
) -> None:
    text = make_page(write_rows, chatml, tmp_path)
    [head] = re.findall(r"<h1>(.*)</h1>", text)
    assert re.fullmatch(rf"{chatml.name} can learn from \d+ of 60 rows", head)
    assert str(chatml) not in text
    [line] = re.findall(r"<tr><td><code>[^<]*:42</code></td><td>redacted-secret</td><td>([^<]*)</td></tr>", text)
    assert "GitHub token in the answer" in line
    assert TOKEN not in text


def test_it_tells_what_can_be_learned_from_beside_good_rows(
    write_rows: Callable[..., Path], chatml: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"question {i}?", "chosen": f"good {i} {i * 7}", "rejected": f"bad {i * 3}"} for i in range(70)]
    page = tmp_path / "report.html"
    check(DataConfig(path=str(write_rows(rows))), model_folder=chatml, page=page)
    [section] = re.findall(r"<h2>To learn from beside good rows</h2>(.*?)</section>", page.read_text())
    [(count, used)] = re.findall(r'<td>pairs</td><td class="n">(\d+)</td><td>([^<]*)</td>', section)
    assert 0 < int(count) <= 70 and used == "not used: learn does not name it"


@pytest.mark.slow
def test_nothing_is_cut_and_every_label_can_be_read_on_a_narrow_screen(
    write_rows: Callable[..., Path], chatml: Path, tmp_path: Path
) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here")
    path = tmp_path / "page.html"
    path.write_text(make_page(write_rows, chatml, tmp_path).replace("</main>", f"</main>{PROBE}"))
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--window-size=400,900", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    needed, there, smallest = re.findall(r"<title>(\d+) (\d+) ([\d.]+)</title>", done.stdout)[0]
    assert int(needed) <= int(there)
    assert float(smallest) >= 11  # of 14.4 on a wide one
