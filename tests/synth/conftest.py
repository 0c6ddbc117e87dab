"""Pages that were written for these tests: what they document exists nowhere else."""

from pathlib import Path

import pytest

from hivetune.synth.packs.pack import Pack
from hivetune.synth.sources.places import Library

HERE = Path(__file__).parent


@pytest.fixture
def places() -> Library:
    return Library((HERE / "pages",))


@pytest.fixture
def hive_pack() -> Pack:
    names = ("combcopy(1)", "hivectl(1)", "waxd(8)", "hive.unit(5)", "broken(1)", "alias(1)")
    return Pack("bees", "bees", "test", pages=names, documents=(str(HERE / "documents"),))
