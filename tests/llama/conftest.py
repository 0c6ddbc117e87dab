"""One converted model serves all tests of the server."""

from pathlib import Path

import pytest
from serve.hive import make_home


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as GGUF, q8_0."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIVETUNE_HOME", str(folder))
        make_home()
    return next(folder.glob("bases/*/*.gguf"))
