"""The full counts: 1,500 rows of a Debian machine's pages, looked at by other means.

The pages of packages that are not installed may lie below the folder that HIVETUNE_PAGES names (docs/synth.md).
"""

import gzip
import html
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from extraction import answers, options_named, options_without_source, plain_source, rows_of

pytestmark = pytest.mark.proof
ROWS = 1500
LEAST_CATEGORIES = 20
LEAST_RATIO = 0.7  # of distinct-2, ours to a real set's, at the same number of words
MOST_SECONDS = 120  # of processor time: it uses one core, so that a quiet machine takes no longer
MOST_MEMORY_MB = 400
NEAR = 0.8
INSTALL = "the packages of docs/synth.md, installed, or unpacked into a folder that HIVETUNE_PAGES names"


def synth(out: Path, *options: str) -> tuple[dict[str, Any], tuple[float, float], float]:
    """(report, seconds of processor and clock, largest memory in MB) of one run of the command."""
    command = [sys.executable, "-m", "hivetune", "synth", *roots(), "--out", str(out), "--json", *options]
    started = time.monotonic()
    with open(out.with_suffix(".json"), "wb") as said:
        process = subprocess.Popen(command, stdout=said)
        _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return (
        json.loads(out.with_suffix(".json").read_text()),
        (
            usage.ru_utime + usage.ru_stime,
            time.monotonic() - started,
        ),
        usage.ru_maxrss / 1024,
    )


def roots() -> list[str]:
    return [os.environ["HIVETUNE_PAGES"]] if os.environ.get("HIVETUNE_PAGES") else []


def shares() -> list[Path]:
    return [Path(root) / "usr/share" for root in (*roots(), "/")]


def read(pattern: str) -> Iterator[str]:
    """The text of files that a package brings."""
    for share in shares():
        found = sorted(share.glob(pattern))
        for path in found:
            data = path.read_bytes()
            yield (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")
        if found:
            return


def plain_words(text: str) -> list[str]:
    """The words of a text in order, without the marks of code."""
    return text.lower().replace("`", " ").split()


def distinct(words: Sequence[str], n: int) -> float:
    """The share of sequences of `n` words that are different, 0 to 1."""
    sequences = list(zip(*(words[i:] for i in range(n)), strict=False))
    return round(len(set(sequences)) / len(sequences), 4) if sequences else 0.0


def perl_questions() -> list[str]:
    text = "\n".join(re.sub(r"\\f.|\\&", "", page).replace("\\-", "-") for page in read("man/man1/perlfaq?.1*"))
    return [title.replace('""', '"').strip('"') for title in re.findall(r'^\.S[SH] +"?(.*\?)"?$', text, re.M)]


def python_questions() -> list[str]:
    text = "\n".join(read("doc/python3*/html/_sources/faq/*.rst.txt"))
    return list(dict.fromkeys(re.findall(r"^(.*\?)\n[-=]{3,}$", text, re.M)))


def debian_questions() -> list[str]:
    text = "\n".join(read("doc/debian/FAQ/debian-faq.en.txt*"))
    found = re.findall(r"^ *\d+\.\d+\.? +(\S.*\?)$", text, re.M)
    return [html.unescape(question) for question in dict.fromkeys(found)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], tuple[float, float], float]:
    out = tmp_path_factory.mktemp("synth") / "rows.jsonl"
    document, seconds, memory_mb = synth(out, "--rows", str(ROWS))
    if len(document["empty"]) > 24 - LEAST_CATEGORIES:
        pytest.skip(f"no pages for {', '.join(document['empty'])}: needs {INSTALL}")
    return out, document, seconds, memory_mb


def test_categories_are_filled_in_time(made: Any, record_property: Callable[[str, object], None]) -> None:
    _, document, seconds, memory_mb = made
    filled = [one for one in document["categories"] if one["kept"]]
    assert document["rows"] == ROWS and len(filled) >= LEAST_CATEGORIES
    target = ROWS / len(filled)
    assert all(abs(one["kept"] - target) <= 0.1 * target for one in filled)
    assert seconds[0] < MOST_SECONDS and memory_mb < MOST_MEMORY_MB
    record_property("rows", document["rows"])
    record_property("categories_filled", len(filled))
    record_property("empty", ", ".join(document["empty"]))
    record_property("processor_seconds", round(seconds[0], 1))
    record_property("seconds", round(seconds[1], 1))
    record_property("memory_mb", round(memory_mb))
    record_property("rejected", json.dumps(document["rejected"]))


def test_no_option_without_a_source(made: Any, record_property: Callable[[str, object], None]) -> None:
    named = 0
    for row in rows_of(made[0]):
        assert row["synth"]["sources"] and all(Path(one["file"]).is_file() for one in row["synth"]["sources"])
        assert options_without_source(row) == set(), row
        named += len(options_named(answers(row)))
    assert named > 400
    record_property("options_named", named)
    record_property("options_without_source", 0)


def test_what_is_invented_is_nowhere_on_the_page(made: Any, record_property: Callable[[str, object], None]) -> None:
    wrong = [row for row in rows_of(made[0]) if row["synth"].get("absent")]
    for row in wrong:
        for option in row["synth"]["absent"]:
            assert option not in answers(row)
            assert option not in plain_source(Path(row["synth"]["sources"][0]["file"]))
    assert wrong
    record_property("questions_with_an_invented_option", len(wrong))


@pytest.mark.parametrize("real", [perl_questions, python_questions, debian_questions])
def test_questions_are_as_diverse_as_real_ones(
    made: Any, real: Callable[[], list[str]], record_property: Callable[[str, object], None]
) -> None:
    words = [word for question in real() for word in plain_words(question)]
    if not words:
        pytest.skip(f"{real.__name__} are not here: needs apt install perl-doc python3.11-doc debian-faq")
    ours = [word for row in rows_of(made[0]) for word in plain_words(row["messages"][0]["content"])]
    found, wanted = distinct(ours[: len(words)], 2), distinct(words, 2)
    record_property("questions", len(real()))
    record_property("words", len(words))
    record_property("distinct_2", f"{found} beside {wanted} of the real ones")
    record_property("ratio", round(found / wanted, 3))
    assert found >= LEAST_RATIO * wanted


def test_few_rows_are_nearly_equal(made: Any, record_property: Callable[[str, object], None]) -> None:
    """Every pair is compared, word triple by word triple: no sketch is trusted here."""
    texts = [" ".join(m["content"] for m in row["messages"]).lower().split() for row in rows_of(made[0])]
    sets = [frozenset(zip(words, words[1:], words[2:], strict=False)) for words in texts]
    near = set()
    for one, other in combinations(range(len(sets)), 2):
        a, b = sets[one], sets[other]
        if min(len(a), len(b)) >= NEAR * max(len(a), len(b)) and len(a & b) >= NEAR * len(a | b) > 0:
            near.add(other)
    record_property("near_duplicates", len(near))
    record_property("share", round(len(near) / len(sets), 4))
    assert len(near) < 0.01 * len(sets)
