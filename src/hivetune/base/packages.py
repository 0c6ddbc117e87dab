"""The command that installs what an optional part of Hivetune needs. Hivetune itself is in no package index."""

import re
from importlib import metadata
from pathlib import Path

from hivetune.base.paths import quoted

ROOT = Path(__file__).parents[3]


def install_command(extra: str) -> str:
    """Of the source folder that this was installed from; without one, of the packages that the extra names."""
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e {quoted(f'{ROOT}[{extra}]')}"
    needed = [line.partition(";") for line in metadata.requires("hivetune") or ()]
    names = [quoted(name.strip()) for name, _, when in needed if extra in re.findall(r"[\w-]+", when)]
    return f"pip install {' '.join(names)}"
