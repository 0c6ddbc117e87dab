"""What can be compared: a side as it is named on the command line or in the config. Pure; nothing is opened here.

base                          the model that a run was trained on, without its adapter
helpdesk@3, helpdesk@champion a release
last, my-run, FOLDER          a run
model-q8_0.gguf               a GGUF file
http://HOST:PORT/v1#MODEL     any server that speaks OpenAI's chat API
figures.yaml, figures.json    figures that were measured elsewhere
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from hivetune.errors import UsageError

SideKind = Literal["base", "release", "run", "gguf", "endpoint", "recorded"]
SIDES = ("base", "tuned")  # the two of an evaluation, as its document names them
BASELINE = "base"  # what a run is compared with unless the config says otherwise
# What a file of recorded figures may say: its name, the metric, and what one of it is in the metric's unit.
_PLAIN = ("success", "ended", "latency_s", "first_token_s", "cold_start_s", "tokens_per_second")
FIGURES: Mapping[str, tuple[str, float]] = {
    **{name: (name, 1.0) for name in _PLAIN},
    "memory_gb": ("peak_memory_bytes", 1e9),
}
SHARES = ("success", "ended")


@dataclass(frozen=True)
class NamedSide:
    """A side of a comparison. `name` is what the user wrote, without the model of an endpoint, which is `model`."""

    kind: SideKind
    name: str
    model: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}#{self.model}" if self.model else self.name


def parse_side(text: str, where: str = "") -> NamedSide:
    """Return the side that a text names. Raises UsageError for an invalid text. Whether the side exists is checked
    later."""
    prefix = f"{where}: " if where else ""
    if text == BASELINE:
        return NamedSide("base", BASELINE)
    if text.startswith(("http://", "https://")):
        return _endpoint(text, prefix)
    suffix = text.lower().rpartition(".")[2]
    if suffix == "gguf":
        return NamedSide("gguf", text)
    if suffix in ("json", "yaml", "yml"):
        return NamedSide("recorded", text)
    if not text or text.startswith("-"):
        raise UsageError(
            f"{prefix}{text!r} can't be compared",
            hint="give base, NAME@VERSION, a run, a .gguf file, http://HOST:PORT/v1#MODEL or a .yaml file of figures",
        )
    if "@" in text and "/" not in text:
        return NamedSide("release", text)
    return NamedSide("run", text)


def _endpoint(text: str, prefix: str) -> NamedSide:
    url, _, model = text.partition("#")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{prefix}{url} is not a URL: {error}") from None
    if not host or parts.query:
        raise UsageError(f"{prefix}{url} is not the URL of a server", hint="for example http://localhost:8080/v1#MODEL")
    if parts.username or parts.password:
        raise UsageError(
            f"{prefix}the URL of {host} holds a password", hint="put the key into HIVETUNE_ENDPOINT_KEY instead"
        )
    if not model:
        raise UsageError(f"{prefix}{url} names no model", hint=f"put it after '#': {url}#MODEL")
    return NamedSide("endpoint", url.rstrip("/"), model)


def read_figures(document: Any, where: str) -> dict[str, float]:
    """Return the values of a file of recorded figures by metric. Raises UsageError naming the key that is wrong."""
    if not isinstance(document, Mapping) or not document:
        raise UsageError(
            f"{where} contains no figures", hint=f"one a line, such as 'latency_s: 20.1'; {_known_figures()}"
        )
    figures = {}
    for key, value in document.items():
        if key not in FIGURES:
            near = difflib.get_close_matches(str(key), FIGURES, 1)
            raise UsageError(
                f"{where}: unknown figure {str(key)!r}", hint=f"did you mean {near[0]!r}?" if near else _known_figures()
            )
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise UsageError(f"{where}: {key} is {value!r}, not a number of at least 0")
        if key in SHARES and value > 1:
            raise UsageError(f"{where}: {key} is {value:g}; it is a share between 0 and 1", hint="98 % is 0.98")
        metric, unit = FIGURES[key]
        figures[metric] = float(value) * unit
    return figures


def _known_figures() -> str:
    return f"known: {', '.join(FIGURES)}"
