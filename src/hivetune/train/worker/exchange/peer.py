"""One worker's connection, as the run's own process waits on it: for news of its own, or for the worker's end."""

import contextlib
import select
import socket

from hivetune.train.worker.exchange.wire import WireError


class Peer:
    """Use as a context, which does not close `connection`. One thread waits; any may ring or hang up."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._woken, self._bell = socket.socketpair()
        self._woken.setblocking(False)
        self._bell.setblocking(False)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._woken.close()
        self._bell.close()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it is gone
            self._bell.send(b"\0")

    def hang_up(self) -> None:
        """Whoever reads from the connection finds its end."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s: float | None) -> None:
        """Until somebody rings, or for `timeout_s`. Raises OSError when the worker ended meanwhile, or the network."""
        poll = select.poll()  # `select` refuses handles from 1,024 on
        poll.register(self.connection, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        ready = [handle for handle, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)]
        if self.connection.fileno() in ready:
            if not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("the worker closed the connection")
            raise WireError("it speaks without being asked")
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
