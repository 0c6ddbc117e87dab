"""Pages that were written for these tests: what they document exists nowhere else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hivetune.synth.packs import Library, Pack

HERE = Path(__file__).parent
KEYS = ("combkey(1)", "combargs(1)")


@pytest.fixture(scope="module")  # `man` reads the variable too, and with it no task of a later file could be forked
def library() -> Iterator[Library]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANPATH", str(HERE / "pages"))
        made = Library()
        assert ("combcopy", "1") in made.manuals  # which are looked for once
        yield made


@pytest.fixture(scope="session")
def hive_pack() -> Pack:
    names = ("combcopy(1)", "hivectl(1)", "waxd(8)", "hive.unit(5)", "broken(1)", "alias(1)", *KEYS)
    return Pack(pages=names, documents=(str(HERE / "documents"),), category="bees", title="bees")
