"""A page before it is HTML: its template and its values; and how templates become HTML.

A page that is open asks for itself again every three seconds, and shows what is new. All values are escaped, except
`Markup` that was escaped where it was made.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hivetune.base.paths import quoted
from hivetune.base.units import duration, number, size
from hivetune.dashboard.access import BELOW, form_token
from hivetune.dashboard.watched import Watcher, run_id, short_path
from hivetune.errors import UsageError

DASHBOARD_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class PageRequest:
    """A request as pages see it. `path` begins after /dashboard. `named`: the parameters in the path. `form`: posted
    fields; None for a page that is only looked at."""

    path: str
    named: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Page:
    """A page. `live`: it is updated while it is open."""

    template: str
    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    live: bool = False


MakePage = Callable[[Watcher, PageRequest], Page]


@contextmanager
def of_this_version(path: Path) -> Iterator[None]:
    """Raise UsageError for a document that lacks a shown field, perhaps of another version."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, jinja2.UndefinedError) as error:
        raise UsageError(
            f"{path} can't be shown: {error!r}", hint="another version of Hivetune may have written it"
        ) from None


def whole(page: Page, request: PageRequest, *, signed_in: bool = True) -> str:
    """Return the whole document."""
    frame = {
        "title": page.title,
        "live": page.live,
        "signed_in": signed_in,
        "here": "/" + request.path.strip("/").partition("/")[0],
        "made": time.time(),
    }
    return fragment(page.template, {**frame, **page.values})


def fragment(template: str, values: Mapping[str, Any]) -> str:
    """Return a template, or a piece of a page, as HTML."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(DASHBOARD_FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"base": BELOW, "form_token": form_token, "run_id": run_id, "short_path": short_path}
    filters = {"moment": _moment, "ago": _ago, "count": _count, "quoted": quoted, "thousands": "{:,}".format}
    environment.filters |= {"duration": duration, "size": size, "number": number, **filters}
    return environment


def _moment(seconds: float) -> Markup:
    """Return a time of this machine's clock."""
    local = time.localtime(seconds)
    shown, exact = time.strftime("%Y-%m-%d %H:%M:%S", local), time.strftime("%Y-%m-%dT%H:%M:%S%z", local)
    return Markup('<time datetime="{}">{}</time>').format(exact, shown)


def _ago(seconds: float) -> Markup:
    """Return a time, and how long ago it was."""
    return _moment(seconds) + f" ({duration(max(0.0, time.time() - seconds))} ago)"


def _count(value: int, singular: str, many: str = "") -> str:
    """Return a count such as "1 row" or "2,000 rows"."""
    return f"{value:,} {singular if value == 1 else many or singular + 's'}"
