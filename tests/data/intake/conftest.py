"""One real Redis for all tests of a session."""

from collections.abc import Iterator

import pytest
from data.intake.collecting import RedisServer


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    """The server, empty."""
    running.client.flushall()
    return running
