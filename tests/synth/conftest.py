"""Pages that were written for these tests: what they document exists nowhere else."""

from pathlib import Path

import pytest

from hivetune.synth.packs import Library, Pack

HERE = Path(__file__).parent
KEYS = ("combkey(1)", "combargs(1)")


@pytest.fixture(scope="session")
def places() -> Library:
    return Library((HERE / "pages",))


@pytest.fixture(scope="session")
def hive_pack() -> Pack:
    names = ("combcopy(1)", "hivectl(1)", "waxd(8)", "hive.unit(5)", "broken(1)", "alias(1)", *KEYS)
    return Pack(pages=names, documents=(str(HERE / "documents"),), category="bees", title="bees")
