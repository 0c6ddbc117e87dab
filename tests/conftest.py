"""Fixtures that every room shares: a home of its own, the demo model, a tiny one. And how tests share two cores."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import platformdirs
import pytest
from forks import FORKS
from hypothesis import settings
from once import one_at_a_time

import hivetune
from hivetune.process import parent
from hivetune.process.launch import VARIABLE

# By default an example that takes 200 ms fails: beside other work any may. `make test` checks the same examples every
# time, so that no change fails by chance. `make proof NAME=properties` draws others.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HIVETUNE_EXAMPLES_PROFILE", "fixed"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and programs that the tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # the same of nohup: it goes on, and its programs can be told

# Read when triton is imported, which transformers does too: the kernels for cards run in its interpreter here.
os.environ["TRITON_INTERPRET"] = "1"

# llama.cpp's converter, as `make` has fetched it, whatever home a test has.
_HOME = os.environ.get("HIVETUNE_HOME") or platformdirs.user_data_dir("hivetune")
os.environ.setdefault("HIVETUNE_CONVERTERS", str(Path(_HOME) / "converter"))

# Modules stay: a collection looks at all that torch and transformers made of them for half a second, each time.
gc.disable()

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread for each worker and for the programs that it starts: two that compute on all cores hinder each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


OLD_S = 24 * 3600.0  # of a kept model that other code has prepared

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


# What a file says of all its tests. Below folders `worker` torch computes.
_MARKED = re.compile(r"^pytestmark = pytest\.mark\.(slow|proof)\b", re.MULTILINE)


def mark_of(path: Path) -> str:
    """Return the mark of all tests of a file or folder, empty if each has its own."""
    if "worker" in path.parts:
        return "slow"
    match = _MARKED.search(path.read_text(encoding="utf-8")) if path.match("test_*.py") else None
    return match[1] if match else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import nothing of which no test is wanted: torch alone takes each worker of `make check` 4 s of the processor."""
    mark = mark_of(collection_path)
    return True if mark and f"not {mark}" in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no worker is left alone with one at the end."""
    for item in items:
        if "worker" in item.path.parts:
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _without_a_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _without_a_skip((yield))


def _without_a_skip(report: Report) -> Report:
    """Fail what is skipped where everything that tests need must be at hand (CI), wherever the skip stands."""
    if report.skipped and os.environ.get("HIVETUNE_REQUIRE_ALL") == "1" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome, report.longrepr = "failed", f"HIVETUNE_REQUIRE_ALL=1 allows no skip. {reason}"
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let all workers of pytest-xdist have one fork server: each would load torch and transformers for 4 s."""
    if "not slow" not in node.config.option.markexpr:
        FORKS.begin()
        node.workerinput["forks"] = FORKS.serve(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))


@pytest.fixture(scope="session", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """One process imports torch and transformers for all tasks that the tests of this process start."""
    # What tests make the same each time is made once, and copied (serve/hive.py).
    own = tmp_path_factory.getbasetemp()
    # All workers of pytest-xdist see the folder of the whole session.
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    os.environ["HIVETUNE_TEST_COMMON"] = str(shared / "common")
    FORKS.begin(getattr(pytestconfig, "workerinput", {}).get("forks"))
    with mock.patch.object(parent, "start_process", FORKS.start_process):
        yield


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """No test reads or writes the user's home. The CPU kernels, named by their source, are compiled once (10 s)."""
    home = tmp_path_factory.mktemp("home")
    kernels = os.environ.get("HIVETUNE_KERNELS") or str(pytestconfig.cache.mkdir("kernels"))
    # Libraries leave variables behind (torch.compile its cache's folder), with which no later test could be forked.
    with mock.patch.dict(os.environ, {"HIVETUNE_HOME": str(home), "HIVETUNE_KERNELS": kernels, VARIABLE: "{}"}):
        yield home


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """The prepared demo model. It is made once (20 s) for this code, in pytest's cache, or in HIVETUNE_TEST_CACHE."""
    from hivetune.base.disk import manifest_problems, sha256_bytes
    from hivetune.process.parent import run_task
    from hivetune.process.protocol import PrepareModel

    source = Path(hivetune.__file__).parent
    files = sorted([*source.glob("models/**/*.py"), *source.glob("data/render/*.py")])
    code = b"".join(path.read_bytes() for path in files)
    kept = pytestconfig.cache.mkdir("demo-model") / sha256_bytes(code)[:16]
    parent = Path(os.environ.get("HIVETUNE_TEST_CACHE") or kept)
    folder = parent / "smollm2-135m"
    with one_at_a_time(parent):
        if manifest_problems(folder):
            for other in kept.parent.iterdir():
                if other != kept and other.stat().st_mtime < time.time() - OLD_S:
                    shutil.rmtree(other)
            task = PrepareModel("smollm2-135m", folder)
            run_task(task, parent / "smollm2-135m.task").check("preparing the demo model")
    return folder


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` leaves it: 2 layers, 32 wide, a chat template, a trained tokenizer."""
    from data.models import make_model
    from train.worker.models import as_source

    return as_source(make_model(tmp_path_factory.mktemp("source") / "tiny"))


@pytest.fixture(scope="session")
def tiny_model_folder(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama, made by the real preparation."""
    from hivetune.models.worker.prepare_model import prepare_model

    target = tmp_path_factory.mktemp("prepared") / "tiny"
    prepare_model(str(tiny_source), target)
    return target


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """write_rows([row or line, ...]) -> a JSONL file; strings are written as they are."""

    def write(rows: Iterable[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a ChatML template, as data preparation reads it; no weights."""
    from data.models import make_model

    return make_model(tmp_path_factory.mktemp("chatml"))
