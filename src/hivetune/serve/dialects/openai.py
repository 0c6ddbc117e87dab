"""OpenAI's chat completions and completions, which the model server speaks too: its documents get our names."""

from collections.abc import Mapping
from typing import Any

from hivetune.serve.dialects.base import CHAT, Dialect, Named, Read, Recall, data, error_body
from hivetune.serve.fields import CHAT_FIELDS, TEXT_FIELDS, Api, checked_fields


class _Writer:
    def __init__(self, named: Named):
        self._names = {"id": named.id, "model": named.label, "system_fingerprint": named.label}

    def whole(self, document: Mapping[str, Any]) -> dict[str, Any]:
        return {**document, **self._names}

    def event(self, piece: Mapping[str, Any]) -> bytes:
        return data(self.whole(piece))

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, message: str) -> bytes:
        return data(error_body(502, message))


def _dialect(path: str, main_field: str, fields: Api) -> Dialect:
    def read(document: Mapping[str, Any], recall: Recall) -> Read:
        return Read(checked_fields(fields, document))

    return Dialect(path, path, main_field, read, _Writer, thoughts=False)


TEXT = "/v1/completions"
OPENAI = (
    _dialect(CHAT, "messages", CHAT_FIELDS),
    _dialect(TEXT, "prompt", TEXT_FIELDS),
)
