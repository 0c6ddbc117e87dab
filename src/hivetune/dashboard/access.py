"""Access to the dashboard: whoever can read its token in the home. A browser exchanges the token for a cookie, once.

It is not the token of a gateway's client, since a client that may ask a model questions may not promote one. Cookie and
forms carry values derived from the token, so that neither reveals it.
"""

import hmac
import secrets
from pathlib import Path

from hivetune.base.disk import home, write_atomic
from hivetune.base.private import make_folder, open_plain
from hivetune.serve.guard import Door, cookie_of_home

BELOW = "/dashboard"
LOGIN = f"{BELOW}/login"
STATIC = ("dashboard.css", "dashboard.js", "page.css")


def dashboard_token(*, new: bool = False) -> str:
    """Return the token of this home, made where there is none. `new`: make another one, which signs everybody out."""
    if new or not _path().exists():
        make_folder(_path().parent)
        write_atomic(_path(), secrets.token_urlsafe(32).encode())
    return _read()


def cookie_name() -> str:
    """Return the name of this home's cookie."""
    return cookie_of_home("hivetune-dashboard")


def cookie_value() -> str:
    """Return the value of the cookie, empty while there is no token."""
    return _derived("cookie")


def form_token(path: str) -> str:
    """Return the value that the form which posts to `path` carries."""
    return _derived(f"form {path}")


def opens(value: str) -> bool:
    """Return whether the value is the token."""
    return is_equal(value, _read())


def is_equal(value: str, expected: str) -> bool:
    """Compare in constant time. Nothing equals an empty value: there is no token yet."""
    return bool(expected) and hmac.compare_digest(value.encode(), expected.encode())


def dashboard_door() -> Door:
    """Return the access rule of everything below /dashboard. The login and its style sheet need no token."""
    return Door(
        client_of=lambda value: "owner" if is_equal(value, cookie_value()) or is_equal(value, _read()) else None,
        below=BELOW,
        cookie=cookie_name(),
        open=frozenset({LOGIN, *(f"{BELOW}/static/{name}" for name in STATIC)}),
        login=LOGIN,
    )


def _derived(use: str) -> str:
    token = _read()
    return hmac.digest(token.encode(), use.encode(), "sha256").hex() if token else ""


def _read() -> str:
    """Read the token, for each request again: a new token counts at once."""
    try:
        with open(open_plain(_path()), encoding="ascii") as file:
            return file.read().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _path() -> Path:
    return home() / "dashboard" / "token"
