"""Who may see the dashboard: whoever can read its token in the home. A browser trades it for a cookie, once.

It is not the token of a client of the gateway: who may ask a model questions may not promote one. Cookie and forms
carry values derived from the token, so that neither gives it away.
"""

import hmac
import secrets
from pathlib import Path

from hivetune.base.disk import home, write_atomic
from hivetune.base.private import make_folder, open_plain
from hivetune.serve.gateway.guard import Door

BELOW = "/dashboard"
LOGIN = f"{BELOW}/login"
STATIC = ("dashboard.css", "dashboard.js", "page.css", "report.css")
COOKIE_NAME = "hivetune-dashboard"
OWNER = "owner"


def dashboard_token(*, new: bool = False) -> str:
    """The token of this home, made where there is none. `new`: another one, so that everybody is signed out."""
    path = _path()
    if new or not path.exists():
        make_folder(path.parent)
        write_atomic(path, secrets.token_urlsafe(32).encode())
    return _read()


def is_token(value: str) -> bool:
    """Compared in constant time."""
    token = _read()
    return bool(token) and hmac.compare_digest(value.encode(), token.encode())


def cookie_value() -> str:
    """What a browser keeps; empty while there is no token."""
    return _derived("cookie")


def form_token(path: str) -> str:
    """What the form that posts to `path` carries."""
    return _derived(f"form {path}")


def is_form_token(path: str, value: str) -> bool:
    expected = form_token(path)
    return bool(expected) and hmac.compare_digest(value.encode(), expected.encode())


def dashboard_door() -> Door:
    """Everything below /dashboard, but for the login and the style sheet that it needs."""
    return Door(
        client_of=_owner,
        below=BELOW,
        cookie=COOKIE_NAME,
        open=frozenset({LOGIN, *(f"{BELOW}/static/{name}" for name in STATIC)}),
        login=LOGIN,
    )


def _owner(value: str) -> str | None:
    expected = cookie_value()
    known = bool(expected) and hmac.compare_digest(value.encode(), expected.encode())
    return OWNER if known or is_token(value) else None


def _derived(use: str) -> str:
    token = _read()
    return hmac.digest(token.encode(), use.encode(), "sha256").hex() if token else ""


def _read() -> str:
    """Read again for each request: a new token counts at once."""
    try:
        with open(open_plain(_path()), encoding="ascii") as file:
            return file.read().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _path() -> Path:
    return home() / "dashboard" / "token"
