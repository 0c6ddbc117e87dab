"""What is built can be installed: wheel and sdist hold all that runs, and each extra names all that it needs.

Nothing is downloaded: an empty environment gets the wheel and links to the distributions that its metadata asks for.
"""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def tracked(below: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", below], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(listed.stdout.split())


def needed(distributions: list[Distribution], extras: set[str]) -> Iterator[Distribution]:
    """What these distributions need, with all that those need, each once."""
    seen: set[tuple[str, frozenset[str]]] = set()
    open_: list[tuple[Distribution, frozenset[str]]] = [(each, frozenset(extras)) for each in distributions]
    while open_:
        found, wanted = open_.pop()
        for text in found.requires or ():
            asked = Requirement(text)
            if asked.marker and not any(asked.marker.evaluate({"extra": extra}) for extra in wanted | {""}):
                continue
            key = (re.sub(r"[-_.]+", "-", asked.name).lower(), frozenset(asked.extras))
            if key in seen:
                continue
            seen.add(key)
            try:
                part = distribution(asked.name)
            except PackageNotFoundError:  # torch's CPU build asks for no CUDA libraries, but its metadata may
                continue
            yield part
            open_.append((part, key[1]))


def environment_of(wheel: Path, extras: set[str], folder: Path) -> Path:
    """The Python of an environment that holds the wheel and links to what its metadata asks for, nothing else."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (info,) = site.glob("hivetune-*.dist-info")
    for part in needed([Distribution.at(info)], extras):
        for top in {file.parts[0] for file in part.files or () if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(part.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return folder / "bin" / "python"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    def run(python: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
        kept = {
            name: os.environ[name] for name in ("PATH", "OMP_WAIT_POLICY", "HIVETUNE_KERNELS") if name in os.environ
        }
        environment = {**kept, "HOME": str(tmp_path), "HIVETUNE_HOME": str(tmp_path / "home")}
        command = [str(python), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    return run


def test_wheel_and_sdist_hold_every_file_that_runs(built: Path) -> None:
    source = {name.removeprefix("src/") for name in tracked("src/hivetune")}
    with zipfile.ZipFile(wheel_in(built)) as wheel:
        assert source <= set(wheel.namelist())
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in source} | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_the_base_needs_what_it_says_and_nothing_else(
    built: Path, tmp_path: Path, run: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    python = environment_of(wheel_in(built), set(), tmp_path / "base")
    script = python.parent / "hivetune"
    script.write_text(f"#!{python}\nfrom hivetune.cli.main import main\nmain()\n")
    script.chmod(0o755)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is two plus two?", "completion": "It is four."}\n')
    assert run(script, "--version").stdout.strip() == distribution("hivetune").version
    for arguments in (("status",), ("check", str(rows)), ("collect", str(rows)), ("releases",), ("config",)):
        done = run(script, *arguments)
        assert done.returncode == 0, done.stderr
    done = run(script, "fetch", "smollm2-135m")
    assert done.returncode == 4 and "pip install" in done.stderr, done.stderr
    missing = run(python, "-c", "import torch")
    assert "No module named 'torch'" in missing.stderr


ENGINE = (
    "import importlib, pkgutil; from hivetune.train import worker as engine\n"
    "names = [module.name for module in pkgutil.walk_packages(engine.__path__, 'hivetune.train.worker.')]\n"
    "for name in names:\n"
    "    if not name.endswith('__main__'): importlib.import_module(name)\n"
    "assert len(names) > 20"
)


@pytest.mark.parametrize(
    ("extras", "script"), [({"train", "export"}, ENGINE), ({"serve"}, "import hivetune.serve.run, xllamacpp")]
)
def test_an_extra_has_all_that_its_part_imports(
    extras: set[str], script: str, built: Path, tmp_path: Path, run: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    done = run(environment_of(wheel_in(built), extras, tmp_path / "environment"), "-c", script)
    assert done.returncode == 0, done.stderr
