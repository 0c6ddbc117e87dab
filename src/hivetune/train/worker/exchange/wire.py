"""Messages between the coordinator and a worker: a line of JSON and bytes, over a socket that a token opened.

Never a pickle. Both ends prove that they know the token and neither sends it (HMAC-SHA-256 over a nonce of the other),
before anything else is read. Nothing is encrypted: a Unix socket stays on this machine, TCP belongs on a network of
one's own.
"""

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

_LENGTHS = struct.Struct("<IQ")
MOST_HEADER_BYTES = 16 << 20
# 2^31 adapter weights as integers.
MOST_PAYLOAD_BYTES = 16 << 30
NONCE_BYTES = 32
# A peer that proves nothing in this time is no worker.
GREETING_TIMEOUT_S = 10.0
# A network that is gone shows itself by unanswered bytes, and by unanswered probes where nothing is sent; without this
# the kernel waits for 15 minutes, or for ever.
NETWORK_TIMEOUT_S = 20.0
PROBE_EVERY_S = 5.0

Payload = bytes | bytearray | memoryview
Room = Callable[[Mapping[str, Any], int], memoryview]


class WireError(OSError):
    """What came is no message of ours, or the peer does not know the token."""


def open_listener(address: str) -> socket.socket:
    """`address`: a path, or HOST:PORT; port 0 takes a free one."""
    if _is_path(address):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        os.chmod(address, 0o600)
    else:
        listener = socket.create_server(_host_port(address))
    listener.listen()
    return listener


def reach(address: str, token: str, timeout_s: float = GREETING_TIMEOUT_S) -> socket.socket:
    """Raises OSError when nobody listens, WireError when the other end does not know the token."""
    if _is_path(address):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(timeout_s)
        peer.connect(address)
    else:
        peer = socket.create_connection(_host_port(address), timeout_s)
    try:
        greet(peer, token, b"worker", b"coordinator")
    except BaseException:
        peer.close()
        raise
    return peer


def greet(peer: socket.socket, token: str, mine: bytes, other: bytes) -> None:
    """Prove the token to each other, then wait without a limit. Raises WireError, OSError.

    `mine`, `other`: the names of the two sides, so that an answer can't be sent back to who gave it.
    """
    peer.settimeout(GREETING_TIMEOUT_S)
    nonce = os.urandom(NONCE_BYTES)
    peer.sendall(nonce)
    peer.sendall(_proof(token, mine, _exactly(peer, NONCE_BYTES)))
    if not hmac.compare_digest(_exactly(peer, hashlib.sha256().digest_size), _proof(token, other, nonce)):
        raise WireError("the other end does not know the token")
    peer.settimeout(None)
    if peer.family != socket.AF_UNIX:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options = {"TCP_USER_TIMEOUT": NETWORK_TIMEOUT_S * 1000, "TCP_KEEPIDLE": PROBE_EVERY_S}
        options["TCP_KEEPINTVL"] = PROBE_EVERY_S  # the kernel's own is 75 s
        for option, value in options.items():
            with contextlib.suppress(AttributeError):  # options of Linux
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), int(value))


def send(peer: socket.socket, header: Mapping[str, Any], payload: Payload = b"") -> None:
    """Raises OSError when the peer is gone."""
    text = json.dumps(header).encode()
    data = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
    peer.sendall(_LENGTHS.pack(len(text), data.nbytes) + text)
    if data.nbytes:
        peer.sendall(data)


def receive(peer: socket.socket, room: Room | None = None) -> tuple[dict[str, Any], memoryview]:
    """The next message; its bytes are written into what `room` gives for its fields and their number.

    Raises WireError, OSError.
    """
    header_bytes, payload_bytes = _LENGTHS.unpack(_exactly(peer, _LENGTHS.size))
    if header_bytes > MOST_HEADER_BYTES or payload_bytes > MOST_PAYLOAD_BYTES:
        raise WireError(f"a message of {header_bytes} and {payload_bytes} bytes")
    try:
        header = json.loads(_exactly(peer, header_bytes))
    except ValueError as error:
        raise WireError(f"not a message: {error}") from None
    if not isinstance(header, dict):
        raise WireError("not a message: no fields")
    payload = memoryview(bytearray(payload_bytes)) if room is None else room(header, payload_bytes)
    if payload.nbytes != payload_bytes:
        raise WireError(f"{payload_bytes} bytes came, {payload.nbytes} were expected")
    _fill(peer, payload)
    return header, payload


def _proof(token: str, who: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), who + nonce, "sha256")


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(peer, memoryview(data))
    return bytes(data)


def _fill(peer: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = peer.recv_into(view[at:])
        if not got:
            raise ConnectionResetError("the peer closed the connection")
        at += got


def _is_path(address: str) -> bool:
    return "/" in address


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise WireError(f"{address} is not HOST:PORT")
    return host, int(port)
