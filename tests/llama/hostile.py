"""Hostile GGUF files, written by code: counts, sizes, offsets, and types that lie."""

import struct
from collections.abc import Sequence
from typing import Any

U32, I32, F32, TEXT, LIST, U64 = 4, 5, 6, 8, 9, 10
_LAYOUT = {U32: "<I", I32: "<i", F32: "<f", U64: "<Q", 0: "<B", 7: "<?"}


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(kind: int, content: Any) -> bytes:
    if kind == TEXT:
        return struct.pack("<I", TEXT) + text(content)
    if kind == LIST:
        element, items = content
        packed = b"".join(text(one) if element == TEXT else struct.pack(_LAYOUT[element], one) for one in items)
        return struct.pack("<IIQ", LIST, element, len(items)) + packed
    return struct.pack("<I", kind) + struct.pack(_LAYOUT[kind], content)


def tensor(name: str = "w", shape: Sequence[int] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)


GOOD: tuple[tuple[str, int, Any], ...] = (
    ("general.architecture", TEXT, "llama"),
    ("tokenizer.ggml.tokens", LIST, (TEXT, ["a", "b", "<0x41>"])),
    ("tokenizer.ggml.scores", LIST, (F32, [0.0, 0.0, 0.0])),
    ("tokenizer.ggml.token_type", LIST, (I32, [1, 1, 6])),
    ("tokenizer.ggml.eos_token_id", U32, 1),
    ("tokenizer.chat_template", TEXT, "{% for m in messages %}{{ m['content'] }}{% endfor %}"),
)


def gguf(
    settings: Sequence[tuple[str, int, Any]] = GOOD,
    tensors: Sequence[bytes] = (tensor(),),
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    raw: bytes = b"",
    data: int = 256,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(settings) + (1 if raw else 0))))
    body = b"".join(text(key) + value(kind, content) for key, kind, content in settings)
    whole = head + body + raw + b"".join(tensors)
    return whole + bytes(-len(whole) % 32) + bytes(data)


def changed(key: str, kind: int, content: Any) -> list[tuple[str, int, Any]]:
    return [*(one for one in GOOD if one[0] != key), (key, kind, content)]


def hostile_files() -> dict[str, bytes]:
    """Name -> content. The names begin with the advisory or issue where there is one."""
    huge = 1 << 63
    return {
        "CVE-2026-7482 a tensor's end past the file's": gguf(tensors=[tensor(shape=(1 << 20, 1 << 10))]),
        "CVE-2026-7482 an offset past the end": gguf(tensors=[tensor(offset=1 << 40)]),
        "ollama-17042 2^63 tensors": gguf(counts=(huge, len(GOOD))),
        "ollama-17042 2^63 settings": gguf(counts=(1, huge)),
        "CVE-2026-27940 sizes whose sum wraps": gguf(tensors=[tensor(shape=(1 << 62,)), tensor("v", (1 << 62,))]),
        "CVE-2025-53630 dimensions whose product wraps": gguf(tensors=[tensor(shape=(1 << 32, 1 << 32, 2))]),
        "CVE-2025-53630 an offset near 2^64": gguf(tensors=[tensor(offset=(1 << 64) - 32)]),
        "GHSA-vgg9 one dimension of 2^64 - 1": gguf(tensors=[tensor(shape=((1 << 64) - 1,))]),
        "llama.cpp-26318 alignment as a text": gguf([*GOOD, ("general.alignment", TEXT, "32")]),
        "llama.cpp-26318 alignment of 64 bits": gguf([*GOOD, ("general.alignment", U64, 32)]),
        "alignment 0": gguf([*GOOD, ("general.alignment", U32, 0)]),
        "alignment 3": gguf([*GOOD, ("general.alignment", U32, 3)]),
        "alignment 2^32 - 1": gguf([*GOOD, ("general.alignment", U32, (1 << 32) - 1)]),
        "an offset between alignments": gguf(tensors=[tensor(offset=1)]),
        "a tensor of an unknown type": gguf(tensors=[tensor(kind=4096)]),
        "a dimension of 0": gguf(tensors=[tensor(shape=(0, 4))]),
        "nine dimensions": gguf(tensors=[tensor(shape=(1,) * 9)]),
        "2^32 - 1 dimensions": gguf(tensors=[text("w") + struct.pack("<I", (1 << 32) - 1)]),
        "rows of half a block": gguf(tensors=[tensor(shape=(33, 2), kind=8)]),
        "the same tensor twice": gguf(tensors=[tensor(), tensor()]),
        "the same setting twice": gguf([*GOOD, GOOD[0]]),
        "CVE-2025-49847 a text longer than the file": gguf(raw=text("x") + struct.pack("<I", TEXT) + text("", 1 << 40)),
        "a key of 2^64 - 1 bytes": gguf(raw=text("", (1 << 64) - 1)),
        "a list of 2^60 numbers": gguf(raw=text("x") + struct.pack("<IIQ", LIST, U32, 1 << 60)),
        "a list of 2^24 texts in a small file": gguf(raw=text("x") + struct.pack("<IIQ", LIST, TEXT, 1 << 24)),
        "a list of lists": gguf(raw=text("x") + struct.pack("<IIQ", LIST, LIST, 4)),
        "a value of an unknown type": gguf(raw=text("x") + struct.pack("<I", 77)),
        "version 1": gguf(version=1),
        "version 3 of the other byte order": b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(64),
        "another magic": b"GGML" + gguf()[4:],
        "no tensor data": gguf(data=0),
        "nothing": b"",
        "only the magic": b"GGUF",
    }
