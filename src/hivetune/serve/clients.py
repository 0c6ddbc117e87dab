"""The clients of the gateway: a token each, stored as a hash in hive.db, shown once and revocable."""

import hashlib
import hmac
import secrets
import sqlite3
import time
from dataclasses import dataclass

from hivetune.base.database import transaction
from hivetune.base.paths import quoted
from hivetune.errors import UsageError

_PREFIX = "hive-"


@dataclass(frozen=True)
class Client:
    """A client of the gateway. `revoked`: when its token was revoked, or None."""

    name: str
    created: float
    revoked: float | None


def make_client(database: sqlite3.Connection, name: str) -> str:
    """Make a token for `name`, shown once and stored as a hash. Raises UsageError for a name that is taken."""
    if not name or not name.isprintable():
        raise UsageError(f"{name!r} can't be the name of a client", hint="use printable characters")
    token = _PREFIX + secrets.token_urlsafe(32)
    with transaction(database):
        if any(client.name == name and client.revoked is None for client in clients(database)):
            raise UsageError(
                f"the client {name!r} already has a token",
                hint=f"revoke it first: hivetune clients --revoke {quoted(name)}",
            )
        database.execute("INSERT OR REPLACE INTO clients VALUES (?, ?, ?, NULL)", (name, _hash(token), time.time()))
    return token


def revoke_client(database: sqlite3.Connection, name: str) -> None:
    """Refuse the client's token from its next request on. Raises UsageError for an unknown client."""
    with transaction(database):
        changed = database.execute(
            "UPDATE clients SET revoked = ? WHERE name = ? AND revoked IS NULL", (time.time(), name)
        ).rowcount
    if not changed:
        names = ", ".join(client.name for client in clients(database) if client.revoked is None) or "none"
        raise UsageError(f"no client is called {name!r}", hint=f"there are: {names}")


def clients(database: sqlite3.Connection) -> list[Client]:
    """Return all clients by name, revoked ones included."""
    rows = database.execute("SELECT name, created, revoked FROM clients ORDER BY name")
    return [Client(*row) for row in rows]


def client_of(database: sqlite3.Connection, token: str) -> str | None:
    """Return the name of the client that holds `token`, or None. Hashes are compared in constant time."""
    digest, holder = _hash(token), None
    for name, stored in database.execute("SELECT name, token_sha256 FROM clients WHERE revoked IS NULL"):
        if hmac.compare_digest(stored, digest):
            holder = str(name)
    return holder


def _hash(token: str) -> str:
    """Return the SHA-256 of a token. A random token of 256 bits can't be guessed, so it needs no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()
