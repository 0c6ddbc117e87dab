"""The gateway's socket, and how it ends when it can't go on."""

import asyncio
import socket

import pytest

from hivetune.serve import run


def test_answers_are_not_held_back_by_nagle() -> None:
    """asyncio sets TCP_NODELAY only on sockets that name their protocol; without it small answers took 40 ms more."""

    async def accepted_with_nodelay() -> bool:
        listening = run.listen_on("127.0.0.1", 0)
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0)
            writer.close()

        server = await asyncio.start_server(connected, sock=listening)
        async with server:
            with socket.create_connection(listening.getsockname()):
                return await asyncio.wait_for(found, 10)

    assert asyncio.run(accepted_with_nodelay())


def test_a_bug_in_what_loads_models_ends_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would answer 503 for ever, and nobody would restart it."""

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(run.Registry, "read", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run.run_gateway(run.GatewaySettings(port=0, capture=True))
