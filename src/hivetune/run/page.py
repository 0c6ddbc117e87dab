"""What a page in one file is made of: a frame and Jinja templates that escape every text.

A page needs nothing else: no script, no font, no network. Rows and answers are other people's.
"""

from functools import cache
from pathlib import Path
from typing import Any

import jinja2

_FRAME = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<style>{{ style | safe }}</style></head><body><main>\n"
    "<h1>{{ heading }}</h1>{{ body | safe }}</main></body></html>\n"
)


def whole_page(title: str, body: str, style: Path, heading: str = "") -> str:
    """Return the page around `body`, HTML that is escaped already. `heading`: the title by default."""
    frame = jinja2.Environment(autoescape=True).from_string(_FRAME)
    return frame.render(title=title, heading=heading or title, body=body, style=style.read_text(encoding="utf-8"))


@cache
def _template(path: Path) -> jinja2.Template:
    loader = jinja2.FileSystemLoader(path.parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.filters["cut"] = lambda text, longest: text if len(text) <= longest else text[:longest] + " ..."
    return environment.get_template(path.name)


def render(path: Path, **values: Any) -> str:
    """Return the text of a template. Its filter `count` separates thousands, `cut` shortens a text to so many
    characters. Raises jinja2.UndefinedError for a value that it needs and is not given."""
    return _template(path).render(**values)
