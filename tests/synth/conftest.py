"""Pages that were written for these tests: what they document exists nowhere else."""

from pathlib import Path

import pytest

from hivetune.synth.packs import Library, Pack

HERE = Path(__file__).parent
KEYS = ("combkey(1)", "combargs(1)")


@pytest.fixture(scope="session")
def library() -> Library:
    with pytest.MonkeyPatch.context() as patch:
        # Until they were looked for, which is done once: with a variable of its own no later task could be forked.
        patch.setenv("MANPATH", str(HERE / "pages"))
        made = Library()
        assert ("combcopy", "1") in made.manuals
    return made


@pytest.fixture(scope="session")
def hive_pack() -> Pack:
    names = ("combcopy(1)", "hivectl(1)", "waxd(8)", "hive.unit(5)", "broken(1)", "alias(1)", *KEYS)
    return Pack(pages=names, documents=(str(HERE / "documents"),), category="bees", title="bees")
