"""What an API has to say to be served: how its request is read, and how an answer, a stream and an error look."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Named:
    """The names of an answer that clients see: its id, the label of its release, and the checked fields it answers."""

    id: str
    label: str
    fields: Mapping[str, Any]


class Writer(Protocol):
    """Writes a stream: pieces as chat completions have them become server-sent events of the API."""

    def event(self, piece: Mapping[str, Any]) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, message: str) -> bytes: ...


@dataclass(frozen=True)
class Dialect:
    """An API. `path`: here. `upstream`: the model server's API that it is mapped to. `read`: checked fields of a
    document; raises FieldRefused. `main_field`: the field that holds what is asked. `whole`: the answer's document."""

    path: str
    upstream: str
    main_field: str
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    whole: Callable[[Mapping[str, Any], Named], dict[str, Any]]
    writer: Callable[[Named], Writer]


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error that clients of OpenAI's API and of Anthropic's understand: they differ only in the first `type`.
    `param`: the field of the request that caused it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}


def data(document: Mapping[str, Any]) -> bytes:
    """Return an event. In ASCII: clients that read lines by Python's rules end one at U+2028 too."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"
