"""The address of a cluster: who listens there is asked before a run begins."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from hivetune.errors import MachineNotFit, UsageError
from hivetune.process import cluster
from hivetune.process.cluster import own_address

SETTINGS = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)) + bytes((0, 3, 0, 0, 0, 100))


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """HOST:PORT of a program that gives this answer once."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            with closing(server.accept()[0]) as connection:
                answer(connection)
                connection.recv(1)  # until the other side goes

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    "words",
    [b"HTTP/1.0 505 HTTP Version Not Supported\r\n\r\n", b"-ERR unknown command 'PRI'\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"],
)
def test_another_program_is_no_cluster(words: bytes) -> None:
    """What a web server, Redis and a login say to the first bytes of Ray's protocol."""
    with (
        listening(lambda connection: connection.sendall(words)) as address,
        pytest.raises(MachineNotFit, match="another program listens there") as refused,
    ):
        own_address(address)
    assert "docs/cluster.md" in refused.value.hint


def test_who_says_nothing_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER_TIMEOUT_S", 0.1)
    with listening(lambda connection: None) as address, pytest.raises(MachineNotFit, match="does not answer"):
        own_address(address)


def test_a_head_says_which_address_reaches_it() -> None:
    with listening(lambda connection: connection.sendall(SETTINGS)) as address:
        assert own_address(address) == "127.0.0.1"


def test_what_is_no_address_is_said() -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        own_address("somewhere")
