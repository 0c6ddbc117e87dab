"""The rules for secrets: tokens with a known prefix, key blocks, and values that only their place gives away.

rules.toml has the tokens with a prefix, from their makers' documentation; keyed.toml has the other rules. A prefix
has at least three characters that no word begins with and a minimal length follows, so these rules need no entropy.
"""

import base64
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from hivetune.data.checks.redact.rules import (
    CODE_SIGNS,
    HEX,
    MIN_LETTERS_ALONE,
    Check,
    Rule,
    entropy_bits,
    has_digit_and_letter,
    is_placeholder,
    looks_chosen,
    looks_random,
)

# Checks of secrets behind a name. They read the text before the marker, so that no pattern begins with a repetition.
# next_page_token, primary_key and the like name no secret.
NOT_SECRET_NAME = re.compile(
    r"(?:^|[^a-z])(?:public|page|primary|foreign|cache|sort|partition|index|idempot|next|prev|count|max|"
    r"num|n|total|type|"
    r"eos|bos|pad|unk|csrf|xsrf|hash|object|file|path|request|trace|continuation|cursor|sync|resume|limit|dict|map|row|"
    r"group|registration|device|push|dedup|stem|fingerprint|version)[a-z]{0,12}[ _-]?(?:key|token|id|sig|secret)"
    r"|(?:key|token)[ _.-]?(?:type|count|id|name|path|file|order|size|length|limit|url|uri|prefix|"
    r"version|fingerprint)|tokeniz|"
    r"keyboard|pagetoken|publickey|cachekey|primarykey|partitionkey"
)


URL_BEGINS = re.compile(r"\d{1,5}/|[^/]{0,90}//")  # a port and path, or another address: no password
PLAIN_KEY = re.compile(r"(?:^|[^a-z_-])(?:key|sid|sig|auth|signature)[\"'`\\]{0,4}\s{0,3}[=:>]")


def _name_before(text: str, start: int) -> str:
    """Return the text before a value, as far back as its name may begin, in lower case."""
    return text[max(0, start - 60) : start].lower()


def _generated(text: str, start: int, end: int) -> bool:
    """Return whether a value seems random and its name can be a secret's."""
    value = text[start:end].rstrip(".!?)")
    name = re.split(r"[;,&{(\n]", _name_before(text, start))[-1]
    if NOT_SECRET_NAME.search(name[-48:]):
        return False
    if PLAIN_KEY.search(name):
        return len(value) >= 20 and looks_random(value) and ":" not in value and not value.startswith("sha")
    return looks_random(value) and not value.startswith(("sha256", "sha512", "sha1-", "http", "arn:"))


NOT_PASSWORD_NAME = re.compile(
    r"(?:(?:by|com|tres|sur|over|under)pass|reset|forgot|pass\w{0,8}[_-]?(?:file|path|hash|stdin|min|max|len|field|reset))"
    r"\w{0,20}[\s\"':=(]{1,4}\Z"
)
COUNTED_PASS = re.compile(r"(?:[a-z]|^|\s)pass[\"']{0,2}\s{0,3}[:=]|tests? pass")  # "pass: 12, fail: 3"


def _password(text: str, start: int, end: int) -> bool:
    """Return whether a value may be a chosen password: no count of passed tests, no file name, no placeholder."""
    value = text[start:end].rstrip(".?)")
    name = _name_before(text, start)
    if NOT_PASSWORD_NAME.search(name) or (COUNTED_PASS.search(name) and value.isdigit()):
        return False
    return looks_chosen(value)


def _of_value(check: Callable[[str], object]) -> Check:
    """Return a check of the value alone."""
    return lambda text, start, end: bool(check(text[start:end]))


def _is_word_of_sentence(value: str) -> bool:
    """Return whether a word of a sentence may be a password: digits and letters, or one long word."""
    word = value.rstrip(".?)")
    letters_alone = word.isalpha() and word.islower() and len(word) >= MIN_LETTERS_ALONE
    return (looks_chosen(word) and has_digit_and_letter(word)) or letters_alone


def _is_mixed_word(value: str) -> bool:
    """Return whether a word some words after "password" may be one: mixed, and not a word with a number."""
    word = value.rstrip(".?)")
    signed = word[-1:] in "!@#$%^&*" and not word.islower() and word[:-1].isalnum()
    mixed = has_digit_and_letter(word) and not re.fullmatch(r"[a-z]+\d{1,4}", word)
    return looks_chosen(word) and (mixed or signed)


def _is_strong(value: str) -> bool:
    """Return whether a value without a sign before it can't be an ordinary word."""
    if len(value) >= 16 and looks_random(value):
        return True
    return looks_chosen(value) and has_digit_and_letter(value) and (any(c.isupper() for c in value) or "!" in value)


def _is_aws_secret(value: str) -> bool:
    """Return whether 40 characters of base64 are as AWS makes them: both cases and digits, so no hash."""
    mixed = any(c.islower() for c in value) and any(c.isupper() for c in value) and any(c.isdigit() for c in value)
    return mixed and entropy_bits(value) >= 4 and not is_placeholder(value)


_CHECKS: Mapping[str, Check] = {
    "generated": _generated,
    "password": _password,
    "said": _of_value(_is_word_of_sentence),
    "said_mixed": _of_value(_is_mixed_word),
    "quoted": _of_value(lambda value: not is_placeholder(value) and not CODE_SIGNS.search(value)),
    "strong": _of_value(_is_strong),
    "has_digit": _of_value(lambda value: any(map(str.isdigit, value))),
    "opaque": _of_value(looks_random),
    "aws_secret": _of_value(_is_aws_secret),
    "url_password": _of_value(lambda value: not is_placeholder(value) and URL_BEGINS.match(value) is None),
    "command_password": _of_value(lambda value: not is_placeholder(value) and len(value) >= 4),
    "hex_or_random": _of_value(
        lambda value: len(value) >= 32 and looks_random(value) and (HEX.fullmatch(value) or entropy_bits(value) >= 4)
    ),
}


def _behind(keywords: Sequence[str], chars: int, check: Check | None) -> Check:
    """Return a check that one of `keywords` stands in the characters before and that `check` holds."""

    def holds(text: str, start: int, end: int) -> bool:
        front = text[max(0, start - chars) : start].lower()
        return any(word in front for word in keywords) and (check is None or check(text, start, end))

    return holds


def _keyed_rules(path: Path) -> Iterator[Rule]:
    """Yield the rules of keyed.toml; the comment at its top explains the keys."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    fragments: dict[str, str] = {}
    for name, text in document["fragments"].items():
        fragments[f"<{name}>"] = _with_fragments(text, fragments)
    for rule in document["rules"]:
        check = _CHECKS[rule["check"]] if "check" in rule else None
        if "near" in rule:
            check = _behind(rule["near"], 160, check)
        elif "before_code" in rule:
            check = _behind(rule["before_code"], 40, None)
        yield Rule(
            name=rule["id"],
            title=rule["description"],
            placeholder=f"[SECRET:{rule['id']}]",
            regex=_with_fragments(rule["regex"], fragments),
            markers=tuple(document["words"][rule["words"]] if "words" in rule else rule["keywords"]),
            gate=rule.get("gate", "none"),
            tried=rule.get("tried", "behind-marker"),
            group=1,
            folded=True,
            holds=check,
        )


def _with_fragments(text: str, fragments: Mapping[str, str]) -> str:
    for name, fragment in fragments.items():
        text = text.replace(name, fragment)
    return text


KEYED_RULES = tuple(_keyed_rules(Path(__file__).with_name("keyed.toml")))


CHECKSUM_NAME = re.compile(r"(?:sha\d{0,3}|md5|blake\w{0,3})[-_~]\Z", re.IGNORECASE)
# Prefixes of ids of calls, messages and runs: no secrets, and a replaced id would no longer pair call and result.
ID_NAME = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:srv)?toolu|call|fc|msg|message|req|request|resp|rs|run|step|thread|asst|chatcmpl|cmpl|gen|batch"
    r"|file|event|evt|user|org|proj|sess|session|conv|trace|span|lc_run-?|id)[_-]\Z",
    re.IGNORECASE,
)
RUN_OF_LETTERS = re.compile(r"[a-z]{5}|[A-Z]{5}")
# A token of an unknown maker: a short name, then at least 24 generated characters.
NAMED_TOKEN = r"(?<![\w.-])[A-Za-z][A-Za-z0-9]{1,11}[_~-](?:[A-Za-z0-9]{1,10}[_-]){0,2}([A-Za-z0-9]{24,160})(?![\w-])"

NO_KEY = ("xxxxx", "your", "placeholder", "redacted", "_here", "-here", "00000000")
# Lines of base64 with real or escaped line breaks and headers such as "Proc-Type: 4,ENCRYPTED"; the end may be missing.
# The possessive repetition never backtracks, so the time is linear.
PEM = (
    r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:\s|\\[nrt]|[A-Za-z0-9+/=]|[\"',.…]|(?:Proc-Type|DEK-Info|Version|Comment|Hash): [^\n\\]{1,80}+){6,20000}+"
    r"(?:-----END [A-Z0-9 ]{1,40}-----(?:\\n)?)?"
)
PUTTY = r"PuTTY-User-Key-File-\d: [\w -]{1,40}(?:\r?\n[^\n]{1,100}+){1,200}+"


def _rules_from(path: Path) -> Iterator[Rule]:
    """Yield the rules of rules.toml, which has the keys of gitleaks' rules."""
    for rule in tomllib.loads(path.read_text(encoding="utf-8"))["rules"]:
        group = rule.get("secretGroup", 0)
        yield Rule(
            name=rule["id"],
            title=rule["description"],
            placeholder=f"[SECRET:{rule['id']}]",
            regex=rule["regex"] if group else rf"(?<![A-Za-z0-9_]){rule['regex']}",
            flags=re.ASCII,
            markers=tuple(rule["keywords"]),
            gate="long-word",
            tried="anywhere" if group else "at-marker",
            group=group,
            holds=_is_real,
        )


def _is_real(text: str, start: int, end: int) -> bool:
    """Return whether a token is neither `sk-xxxx...` nor a name of words with the same prefix."""
    value = text[start:end]
    if len(set(value[4:].lower())) <= 3 or any(part in value.lower() for part in NO_KEY):
        return False
    body = value.rpartition("_")[2]  # Hugging Face once made tokens of letters only, longer than any word
    return has_digit_and_letter(value[4:]) or value.isupper() or (len(body) >= 30 and body.isalpha())


def _has_key(text: str, start: int, end: int) -> bool:
    """Return whether a block holds a key and is not part of a text about keys."""
    block = text[start:end]
    if re.search(r"(?=[A-Za-z+/]{0,40}\d)[A-Za-z0-9+/=]{24}", block):
        return True
    body = block.partition("KEY")[2].partition("-----END")[0]
    return "-----END" in block and len(body) > 12 and re.search(r"[a-z] [a-z]", body) is None


def _is_generated(text: str, start: int, end: int) -> bool:
    """Return whether a token has both cases, three digits and no word: a hash has one case, a name has words."""
    value = text[start:end]
    digits = sum(c.isdigit() for c in value)
    mixed = any(c.islower() for c in value) and any(c.isupper() for c in value)
    front = text[max(0, start - 12) : start]
    if CHECKSUM_NAME.search(front) or ID_NAME.search(front):
        return False
    return mixed and digits >= 3 and len(set(value)) >= 16 and RUN_OF_LETTERS.search(value) is None


def _block(title: str, marker: str, regex: str) -> Rule:
    shown = "[SECRET:private-key]"
    return Rule("private-key", title, shown, regex, (marker,), tried="at-marker", holds=_has_key)


SECRET_RULES: tuple[Rule, ...] = (
    _block("private key", "-----BEGIN ", PEM),
    _block("PuTTY private key", "PuTTY-User-Key-File-", PUTTY),
    *_rules_from(Path(__file__).with_name("rules.toml")),
)
ENCODED = r"(?<![\w+/=-])([A-Za-z0-9+/]{20,2000}+={0,2})(?![\w+/=])"
NAMED_SECRET = re.compile(rb"(?i)(?:pass|pwd|secret|token|key)[\w-]{0,20}[\"']?\s{0,2}[=:]\s{0,2}\S{6}")


def _is_encoded(text: str, start: int, end: int) -> bool:
    """Return whether base64 holds a line that names a secret, such as DB_PASSWORD=... in a config map."""
    try:
        plain = base64.b64decode(text[start:end], validate=True)
    except ValueError:
        return False
    return (
        NAMED_SECRET.search(plain) is not None and plain.isascii() and plain.decode().replace("\n", " ").isprintable()
    )


# General rules come last, because the more specific rules name their finds better.
_last = partial(Rule, group=1, flags=re.ASCII)
LAST_RULES: tuple[Rule, ...] = (
    _last("token", "access token", "[SECRET:token]", NAMED_TOKEN, gate="mixed-word", holds=_is_generated),
    _last("encoded", "encoded secret", "[SECRET:encoded]", ENCODED, gate="long-word", holds=_is_encoded),
)
