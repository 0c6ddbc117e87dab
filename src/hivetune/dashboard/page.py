"""A page before it is HTML, how templates become HTML, and who may see it: everybody who can read the token in the
home.

A browser exchanges the token for a cookie, once. All values of a page are escaped, except `Markup` that was escaped
where it was made.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hivetune.base.disk import home, write_atomic
from hivetune.base.paths import quoted
from hivetune.base.private import make_folder, open_plain
from hivetune.base.units import count, duration, number, size
from hivetune.dashboard.watched import Watcher, run_id, short_path
from hivetune.errors import UsageError
from hivetune.serve.guard import Door, cookie_of_home

BELOW = "/dashboard"
LOGIN = f"{BELOW}/login"
_FOLDER = Path(__file__).parent
# Evaluations have a style sheet of their own.
STATIC = {
    "dashboard.css": _FOLDER / "static" / "dashboard.css",
    "dashboard.js": _FOLDER / "static" / "dashboard.js",
    "page.css": _FOLDER.parent / "judge" / "page.css",
}


@dataclass(frozen=True)
class PageRequest:
    """A request for a page. `path` begins after /dashboard. `named`: parameters in the path. `form`: fields, None for
    GET."""

    path: str
    named: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Page:
    """A page before it is HTML. `live`: the browser keeps refreshing its content."""

    template: str
    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    live: bool = False


MakePage = Callable[[Watcher, PageRequest], Page]


@contextmanager
def of_this_version(path: Path) -> Iterator[None]:
    """Raise UsageError if a document lacks a field that the page shows; another version may have written it."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, jinja2.UndefinedError) as error:
        message = f"{path} can't be shown: {error!r}"
        raise UsageError(message, hint="another version of Hivetune may have written it") from None


def whole(page: Page, request: PageRequest, *, signed_in: bool = True) -> str:
    """Return a page as a complete HTML document."""
    here = "/" + request.path.strip("/").partition("/")[0]
    frame = {"title": page.title, "live": page.live, "signed_in": signed_in, "here": here, "made": time.time()}
    return fragment(page.template, {**frame, **page.values})


def fragment(template: str, values: Mapping[str, Any]) -> str:
    """Return a template filled with these values as HTML."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> jinja2.Environment:
    loader, strict = jinja2.FileSystemLoader(_FOLDER / "templates"), jinja2.StrictUndefined
    # A value that is not there is an error, which `of_this_version` tells; it is never an empty cell.
    made = jinja2.Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {"base": BELOW, "form_token": form_token, "link": link, "run_id": run_id, "short_path": short_path}
    made.filters |= {"duration": duration, "size": size, "number": number, "quoted": quoted}
    made.filters |= {"moment": moment, "ago": _ago, "count": count, "cell": _cell}
    return made


def link(path: str, text: str) -> Markup:
    """Return a link to a page. `path` begins after /dashboard."""
    return Markup('<a href="{}{}">{}</a>').format(BELOW, path, text)


def moment(seconds: float) -> Markup:
    """Return a time of this machine's clock as HTML; a dash for 0, which means unknown."""
    local = time.localtime(seconds)
    shown, exact = time.strftime("%Y-%m-%d %H:%M:%S", local), time.strftime("%Y-%m-%dT%H:%M:%S%z", local)
    return Markup('<time datetime="{}">{}</time>').format(exact, shown) if seconds else Markup("-")


def _ago(seconds: float) -> Markup:
    return moment(seconds) + f" ({duration(max(0.0, time.time() - seconds))} ago)"


def _cell(value: Any) -> Any:
    """Return a value as the text of a table's cell: numbers with separated thousands, None as a dash."""
    # Losses and rates are floats, counts are not.
    if value is None or isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else value


# A token of its own, not that of a gateway's client: a client that may ask a model may not promote one. Cookie and
# forms carry values derived from it, so that neither reveals it.
def dashboard_token(*, new: bool = False) -> str:
    """Return the token of this home, created if there is none. `new`: replace it, which signs everybody out."""
    if new or not _path().exists():
        make_folder(_path().parent)
        write_atomic(_path(), secrets.token_urlsafe(32).encode())
    return _token()


def cookie_name() -> str:
    """Return the name of the cookie for this home."""
    return cookie_of_home("hivetune-dashboard")


def cookie_value() -> str:
    """Return the value of the cookie; empty if there is no token yet."""
    return _derived("cookie")


def form_token(path: str) -> str:
    """Return the token that the form posted to `path` must carry."""
    return _derived(f"form {path}")


def is_token(value: str) -> bool:
    return is_equal(value, _token())


def is_equal(value: str, expected: str) -> bool:
    """Return whether two secrets are equal, compared in constant time."""
    # Nothing equals an empty value: there is no token yet.
    return bool(expected) and hmac.compare_digest(value.encode(), expected.encode())


def dashboard_door() -> Door:
    """Return the access rule for everything below /dashboard."""
    return Door(
        client_of=lambda value: "owner" if is_equal(value, cookie_value()) or is_token(value) else None,
        below=BELOW,
        cookie=cookie_name(),
        # The login is a page with a style sheet too.
        open=frozenset({LOGIN, *(f"{BELOW}/static/{name}" for name in STATIC)}),
        login=LOGIN,
    )


def _derived(use: str) -> str:
    token = _token()
    return hmac.digest(token.encode(), use.encode(), "sha256").hex() if token else ""


def _token() -> str:
    # Read for each request again: a new token counts at once.
    try:
        with open(open_plain(_path()), encoding="ascii") as file:
            return file.read().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _path() -> Path:
    return home() / "dashboard" / "token"
