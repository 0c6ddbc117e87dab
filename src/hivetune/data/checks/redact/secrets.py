"""Secrets with a form of their own: keys that begin as their makers let them, key blocks, web tokens, webhooks.

Sources: the makers' documentation of their tokens and what they tell secret scanners. A prefix has at least three
characters that no word begins with, and the rest a minimal length, so that no entropy has to be guessed.
"""

import base64
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hivetune.data.checks.redact.rules import Rule, Tried
from hivetune.data.checks.redact.values import has_digit_and_letter

CHECKSUM_NAME = re.compile(r"(?:sha\d{0,3}|md5|blake\w{0,3})[-_~]\Z", re.IGNORECASE)
# What providers put in front of the ids of calls, messages and runs: no secret, and ids that are equal no longer pair.
ID_NAME = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:srv)?toolu|call|fc|msg|message|req|request|resp|rs|run|step|thread|asst|chatcmpl|cmpl|gen|batch"
    r"|file|event|evt|user|org|proj|sess|session|conv|trace|span|lc_run-?|id)[_-]\Z",
    re.IGNORECASE,
)
RUN_OF_LETTERS = re.compile(r"[a-z]{5}|[A-Z]{5}")
# Any maker's token: a short name in front, and 24 characters or more that no person typed.
NAMED_TOKEN = r"(?<![\w.-])[A-Za-z][A-Za-z0-9]{1,11}[_~-](?:[A-Za-z0-9]{1,10}[_-]){0,2}([A-Za-z0-9]{24,160})(?![\w-])"

# Lines of base64 with real or escaped line breaks, headers such as "Proc-Type: 4,ENCRYPTED" among them; the end may be
# missing. Possessive: what was read is never given back, so the time is that of one pass.
NO_KEY = ("xxxxx", "your", "placeholder", "redacted", "_here", "-here", "00000000")
PEM = (
    r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:\s|\\[nrt]|[A-Za-z0-9+/=]|[\"',.…]|(?:Proc-Type|DEK-Info|Version|Comment|Hash): [^\n\\]{1,80}+){6,20000}+"
    r"(?:-----END [A-Z0-9 ]{1,40}-----(?:\\n)?)?"
)
PUTTY = r"PuTTY-User-Key-File-\d: [\w -]{1,40}(?:\r?\n[^\n]{1,100}+){1,200}+"


def read_rules(path: Path) -> tuple[Rule, ...]:
    """Rules in the form of gitleaks' (rules.toml says which keys)."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))["rules"]
    return tuple(_secret(rule, rule.get("secretGroup", 0)) for rule in found)


def _secret(rule: Mapping[str, Any], group: int) -> Rule:
    compiled = re.compile(rule["regex"] if group else rf"(?<![A-Za-z0-9_]){rule['regex']}", re.ASCII)
    shown, tried = f"[SECRET:{rule['id']}]", "anywhere" if group else "at-marker"
    return Rule(
        rule["id"],
        rule["description"],
        shown,
        compiled,
        tuple(rule["keywords"]),
        "long-word",
        cast("Tried", tried),
        group,
        holds=_is_real,
    )


def _is_real(text: str, start: int, end: int) -> bool:
    """Not `sk-xxxx...` and not a name of words that happens to begin so."""
    value = text[start:end]
    if len(set(value[4:].lower())) <= 3 or any(part in value.lower() for part in NO_KEY):
        return False
    return has_digit_and_letter(value[4:]) or value.isupper() or _is_one_word(value)


def _is_one_word(value: str) -> bool:
    """Letters only, but more of them than any word has: Hugging Face once made such tokens."""
    body = value.rpartition("_")[2]
    return len(body) >= 30 and body.isalpha()


def _has_key(text: str, start: int, end: int) -> bool:
    """A block with a line of a key, or with an end and no words inside; not a page that speaks of keys."""
    block = text[start:end]
    if re.search(r"(?=[A-Za-z+/]{0,40}\d)[A-Za-z0-9+/=]{24}", block):
        return True
    body = block.partition("KEY")[2].partition("-----END")[0]
    return "-----END" in block and len(body) > 12 and re.search(r"[a-z] [a-z]", body) is None


def _is_generated(text: str, start: int, end: int) -> bool:
    """Both cases, at least three digits and no words in a row: a hash has one case, a name has words."""
    value = text[start:end]
    digits = sum(c.isdigit() for c in value)
    mixed = any(c.islower() for c in value) and any(c.isupper() for c in value)
    front = text[max(0, start - 12) : start]
    if CHECKSUM_NAME.search(front) or ID_NAME.search(front):
        return False
    return mixed and digits >= 3 and len(set(value)) >= 16 and RUN_OF_LETTERS.search(value) is None


def _block(title: str, marker: str, pattern: str) -> Rule:
    shown = "[SECRET:private-key]"
    return Rule("private-key", title, shown, re.compile(pattern), (marker,), tried="at-marker", holds=_has_key)


SECRET_RULES: tuple[Rule, ...] = (
    _block("private key", "-----BEGIN ", PEM),
    _block("PuTTY private key", "PuTTY-User-Key-File-", PUTTY),
    *read_rules(Path(__file__).with_name("rules.toml")),
)
ENCODED = r"(?<![\w+/=-])([A-Za-z0-9+/]{20,2000}+={0,2})(?![\w+/=])"
NAMED_SECRET = re.compile(rb"(?i)(?:pass|pwd|secret|token|key)[\w-]{0,20}[\"']?\s{0,2}[=:]\s{0,2}\S{6}")


def _is_encoded(text: str, start: int, end: int) -> bool:
    """Base64 of a line that names a secret, as in a config map: DB_PASSWORD=..."""
    try:
        plain = base64.b64decode(text[start:end], validate=True)
    except ValueError:
        return False
    return (
        NAMED_SECRET.search(plain) is not None and plain.isascii() and plain.decode().replace("\n", " ").isprintable()
    )


# Behind all others: they know more about what they find.
LAST_RULES: tuple[Rule, ...] = (
    Rule(
        "token",
        "access token",
        "[SECRET:token]",
        re.compile(NAMED_TOKEN, re.ASCII),
        gate="mixed-word",
        group=1,
        holds=_is_generated,
    ),
    Rule(
        "encoded",
        "encoded secret",
        "[SECRET:encoded]",
        re.compile(ENCODED, re.ASCII),
        gate="long-word",
        group=1,
        holds=_is_encoded,
    ),
)
