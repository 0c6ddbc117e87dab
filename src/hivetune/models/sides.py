"""The sides that can be compared, as the command line or the config names them. Pure; nothing is opened here.

base                          the model that a run was trained on, without its adapter
helpdesk@3, helpdesk@champion a release
last, my-run, FOLDER          a run
model-q8_0.gguf               a GGUF file
http://HOST:PORT/v1#MODEL     any server that speaks OpenAI's chat API
"""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from hivetune.errors import UsageError

SideKind = Literal["base", "release", "run", "gguf", "endpoint"]
SIDES = ("base", "tuned")  # the two of an evaluation, as its document names them
BASELINE = "base"  # what a run is compared with unless the config says otherwise


@dataclass(frozen=True)
class NamedSide:
    """A side of a comparison. `name`: the user's text; for an endpoint only the part before "#", and `model` is the
    part after it."""

    kind: SideKind
    name: str
    model: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}#{self.model}" if self.model else self.name


def parse_side(text: str, where: str = "") -> NamedSide:
    """Return the side that a text names, which may not exist. Raises UsageError for an invalid text."""
    prefix = f"{where}: " if where else ""
    if text.startswith(("http://", "https://")):
        return _endpoint(text, prefix)
    if not text or text.startswith("-"):
        hint = "give base, NAME@VERSION, a run, a .gguf file or http://HOST:PORT/v1#MODEL"
        raise UsageError(f"{prefix}{text!r} is not a model that can be compared", hint=hint)
    kind: SideKind = "release" if "@" in text and "/" not in text else "run"
    return NamedSide("base" if text == BASELINE else "gguf" if text.lower().endswith(".gguf") else kind, text)


def _endpoint(text: str, prefix: str) -> NamedSide:
    url, _, model = text.partition("#")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{prefix}{url} is not a URL: {error}") from None
    if not host or parts.query:
        raise UsageError(
            f"{prefix}{url} is not a URL with http:// or https:// and a host",
            hint="for example http://localhost:8080/v1#MODEL",
        )
    if parts.username or parts.password:  # which is not repeated
        hint = "put the key into HIVETUNE_ENDPOINT_KEY instead"
        raise UsageError(f"{prefix}the URL of {host} contains a password", hint=hint)
    if not model:
        raise UsageError(f"{prefix}{url} names no model", hint=f"put it after '#': {url}#MODEL")
    return NamedSide("endpoint", url.rstrip("/"), model)
