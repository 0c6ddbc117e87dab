"""A checker of the user's own: what it is told, and that nothing it does takes the evaluation with it."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from hivetune.checkers.find import MAX_FAILURES, Checking, find_checker, row_checker
from hivetune.errors import UsageError

ROW = {"prompt": "2 + 2?", "reference": "4", "agent": "a", "category": None, "source": "f:1", "checker": {}}


def checker(folder: Path, body: str, **changes: Any) -> dict[str, Any]:
    path = folder / "checks.py"
    path.write_text(textwrap.dedent(body))
    return {"name": "function", "file": str(path), **changes}


def succeeds(found: dict[str, Any], answer: str = "4") -> bool:
    return Checking().succeeds(answer, found, ended=True, row=ROW)


def test_it_gets_the_answer_and_the_row(tmp_path: Path) -> None:
    body = """
    def right(answer, row):
        print("looking at", answer)
        assert set(row) == {"prompt", "reference", "agent", "category", "source"}
        return row["reference"] in answer
    """
    found = checker(tmp_path, body, function="right")
    assert succeeds(found, "It is 4.") and not succeeds(found, "It is 5.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no luck')", "no luck"),
        ("while True: pass", "took longer than 1 s"),
        ("import os; os._exit(3)", "it ended with code 3"),
        ("import os; os.kill(os.getpid(), 11)", "it ended with code -11"),
        ("print('x' * (1 << 30))", "failed: MemoryError"),
        ("\n        while True: print('x' * 100000)", "printed more than 1 MiB"),
        ("x = bytearray(4 << 30)", "MemoryError"),
        ("return 'yes'", "returned 'yes', not True or False"),
        ("import sys; sys.exit()", "failed"),
    ],
)
def test_whatever_it_does_is_one_error(tmp_path: Path, body: str, said: str) -> None:
    found = checker(tmp_path, f"def check(answer, row):\n        {body}\n", timeout_s=1 if "while" in body[:9] else 10)
    with pytest.raises(UsageError) as raised:
        succeeds(found)
    assert said in raised.value.message and "checks.py" in raised.value.message


@pytest.mark.slow
def test_a_function_that_fails_again_and_again_is_not_run_for_ever(tmp_path: Path) -> None:
    found = checker(tmp_path, "def check(answer, row):\n    open('runs', 'a').write('x')\n    raise ValueError\n")
    found["file"] = str(tmp_path / "checks.py")
    (tmp_path / "checks.py").write_text(
        f"def check(answer, row):\n    open({str(tmp_path / 'runs')!r}, 'a').write('x')\n    raise ValueError\n"
    )
    checking, said = Checking(), []
    for _ in range(MAX_FAILURES + 2):
        with pytest.raises(UsageError) as raised:
            checking.succeeds("4", found, ended=True, row=ROW)
        said.append(raised.value.message)
    assert (tmp_path / "runs").read_text() == "x" * MAX_FAILURES and said[-1].startswith("not checked")
    assert checking.succeeds("4", {"name": "regex", "pattern": "."}, ended=True, row=ROW)


def test_a_row_can_not_name_code(tmp_path: Path) -> None:
    found = checker(tmp_path, "def check(answer, row):\n    return True\n")
    with pytest.raises(UsageError, match=r"only eval\.checker may name a function"):
        succeeds(dict(row_checker(found, None) or {}))
    assert row_checker(None, found) == found and row_checker({"name": "regex", "pattern": "."}, found) == {
        "name": "regex",
        "pattern": ".",
    }


def test_a_config_that_names_no_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        find_checker({"name": "function", "file": str(tmp_path / "none.py")}, "eval.checker")
