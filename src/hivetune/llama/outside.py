"""Checks of GGUF files that Hivetune did not write, before llama.cpp reads them: vocabulary and chat template.

Counts, sizes, offsets and types are checked in every file (models/gguf_header.py). llama.cpp trusts the rest: a byte
token `<0x-1>` is an index (ggml-org/llama.cpp#25969), a list of scores shorter than the vocabulary is read past its end
(lmstudio-ai/lmstudio-bug-tracker#2289), and a template may loop for hours in the server's own process. So the template
is run once in a child of its own first, within bounds of time and memory (data/render/template.py).
"""

import functools
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST
from hivetune.errors import UsageError
from hivetune.models.gguf_header import read_tokenizer
from hivetune.process.sandbox import named_environment

MAX_TOKEN_BYTES = 1 << 16
MAX_TEMPLATE_BYTES = 1 << 20  # the largest published ones have 30,000
TEMPLATE_TIMEOUT_S = 60.0  # with the start of Python on a busy machine; its time on a processor has a limit of its own
TEMPLATE_CPU_S = 10
TEMPLATE_MEMORY_BYTES = 2 << 30
_BYTE_TYPE = 6  # in tokenizer.ggml.token_type
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_BESIDE = ("scores", "token_type")
_TRY_TEMPLATE = """
import sys
from hivetune.data.render.template import ChatTemplate, RenderError
source = sys.stdin.buffer.read().decode("utf-8", "replace")
turns = [{"role": role, "content": "Hello"} for role in ("system", "user", "assistant", "user")]
for first in (0, 1):
    try:
        ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).apply(turns[first:], None, True)
    except RenderError as error:
        if error.reason == "template-limit" or "unsafe" in error.hint or "bits" in error.hint:
            sys.exit(error.hint)
"""


def check_outside(path: Path) -> None:
    """Raise UsageError for a file that llama.cpp must not read. A file that a manifest beside it vouches for is
    taken."""
    if not (path.parent / MANIFEST).is_file():
        status = path.stat()
        _check(path, status.st_size, status.st_mtime_ns + status.st_ctime_ns)


@functools.lru_cache(maxsize=32)
def _check(path: Path, _size_bytes: int, _changed_ns: int) -> None:
    tokenizer = read_tokenizer(path)
    problem = _vocabulary_problem(tokenizer) or _template_problem(tokenizer)
    if problem is not None:
        raise UsageError(f"{path} is refused: {problem}", hint="take the file from a source that you trust")


def _vocabulary_problem(tokenizer: Mapping[str, Any]) -> str | None:
    tokens = tokenizer.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return "its vocabulary is not a list of texts"
    if any(len(token) > MAX_TOKEN_BYTES for token in tokens):
        return f"a token has more than {MAX_TOKEN_BYTES:,} characters"
    for name in _BESIDE:
        beside = tokenizer.get(f"tokenizer.ggml.{name}", tokens)
        if not isinstance(beside, list) or len(beside) != len(tokens):
            return f"{name} is not as long as its vocabulary"
    for token, kind in zip(tokens, tokenizer.get("tokenizer.ggml.token_type", []), strict=False):
        if kind == _BYTE_TYPE and not _BYTE_TOKEN.fullmatch(token):
            return f"its byte token {token[:40]!r} is not a byte"
    for name, value in tokenizer.items():
        if name.endswith("_token_id") and (not isinstance(value, int) or not 0 <= value < max(1, len(tokens))):
            return f"{name} is {value!r}, outside of its vocabulary"
    return None


def _template_problem(tokenizer: Mapping[str, Any]) -> str | None:
    for name, template in tokenizer.items():
        if not name.startswith("tokenizer.chat_template") or not isinstance(template, str):
            continue
        if len(template) > MAX_TEMPLATE_BYTES:
            return f"its chat template has {len(template):,} characters"
        if problem := template_problem(template):
            return problem
    return None


@functools.lru_cache(maxsize=64)
def template_problem(template: str) -> str | None:
    """Return why a chat template is refused, after running it once in a child: it reaches for what a sandbox
    forbids, or takes more time or memory than any real one. A template that only wants other turns is taken."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _TRY_TEMPLATE],
            input=template.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TEMPLATE_TIMEOUT_S,
            env=named_environment(),
            preexec_fn=_limit,
        )
    except subprocess.TimeoutExpired:
        return f"its chat template ran for {TEMPLATE_TIMEOUT_S:.0f} s"
    if child.returncode == 0:
        return None
    lines = child.stderr[-2000:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if child.returncode == 1 and lines else f"its chat template ended a child with {child.returncode}"


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (TEMPLATE_MEMORY_BYTES, TEMPLATE_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (TEMPLATE_CPU_S, TEMPLATE_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
