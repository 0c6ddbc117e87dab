"""OpenAI's chat completions and completions, which the model server speaks too: its documents get our names."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from hivetune.serve.dialects.base import Dialect, Named, data, error_body
from hivetune.serve.fields import ChatFields, TextFields, checked_fields


def _whole(document: Mapping[str, Any], named: Named) -> dict[str, Any]:
    return {**document, "id": named.id, "model": named.label, "system_fingerprint": named.label}


class _Writer:
    def __init__(self, named: Named):
        self._named = named

    def event(self, piece: Mapping[str, Any]) -> bytes:
        return data(_whole(piece, self._named))

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, message: str) -> bytes:
        return data(error_body(502, message))


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
OPENAI = (
    Dialect(CHAT, CHAT, "messages", partial(checked_fields, ChatFields), _whole, _Writer),
    Dialect(TEXT, TEXT, "prompt", partial(checked_fields, TextFields), _whole, _Writer),
)
