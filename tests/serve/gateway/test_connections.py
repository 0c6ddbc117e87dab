"""Silent connections end and others do not: real sockets of this machine, and uvicorn's own protocol."""

import asyncio
import resource
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from hivetune.serve.gateway.guard import limited_protocol, raise_file_limit

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def play(scene: Callable[[Open], Awaitable[None]], head_s: float, max_silent: int = 1000) -> None:
    async def run() -> None:
        app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])
        config = uvicorn.Config(app, http=limited_protocol(head_s, max_silent), lifespan="off", log_level="error")
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: config.http_protocol_class(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await scene(lambda: asyncio.open_connection("127.0.0.1", port))

    asyncio.run(asyncio.wait_for(run(), 60))


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


def test_a_connection_without_a_whole_head_ends() -> None:
    async def scene(open_one: Open) -> None:
        silent, _ = await open_one()
        half, writer = await open_one()
        writer.write(GET[:20])
        assert await ended(silent) and await ended(half)
        after, again = await open_one()
        again.write(GET)
        assert b"here" in await after.readuntil(b"here")
        again.write(GET[:10])  # the next request of a connection that is kept
        assert await ended(after)

    play(scene, head_s=0.05)


def test_of_too_many_the_oldest_makes_room_and_who_speaks_is_heard() -> None:
    async def scene(open_one: Open) -> None:
        spoken, writer = await open_one()
        writer.write(GET)
        await spoken.readuntil(b"here")
        silent = [await open_one() for _ in range(40)]
        for reader, _ in silent[:20]:
            assert await ended(reader)
        writer.write(GET)
        assert b"here" in await spoken.readuntil(b"here")
        for reader, late in silent[20:]:
            late.write(GET)
            assert b"here" in await reader.readuntil(b"here")

    play(scene, head_s=60.0, max_silent=20)


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
