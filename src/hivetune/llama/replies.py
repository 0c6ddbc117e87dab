"""What a llama.cpp server sends back, read: a piece of an answer, an error in words, and what is no reply at all."""

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hivetune.errors import HivetuneError


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """What a server that dies or is no llama.cpp answers with, as a HivetuneError."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise HivetuneError(f"the llama.cpp server's answer broke off: {error or type(error).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise HivetuneError(f"the llama.cpp server's answer can't be understood: {what}") from None


def piece_of(event: Mapping[str, Any]) -> str:
    if "error" in event:
        raise HivetuneError(f"the server failed: {event['error']}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def error_text(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text
