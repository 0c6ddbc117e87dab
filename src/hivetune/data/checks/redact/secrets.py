"""The rules for secrets: tokens with a known prefix (tokens.toml), key blocks, and values behind a name."""

import re
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hivetune.data.checks.redact.rules import (
    Rule,
    has_digit_and_letter,
    is_placeholder,
    looks_chosen,
    looks_random,
    word_list,
)

NO_KEY = ("xxxxx", "your", "placeholder", "redacted", "_here", "-here", "00000000")
# next_page_token, primary_key and the like name no secret.
NOT_SECRET_NAME = re.compile(
    r"(?:^|[^a-z])(?:public|page|primary|foreign|cache|sort|partition|index|idempot|next|prev|count|max|num|n|total|type|"
    r"eos|bos|pad|unk|csrf|xsrf|hash|object|file|path|request|trace|continuation|cursor|sync|resume|limit|dict|map|row|"
    r"group|registration|device|push|dedup|stem|fingerprint|version)[a-z]{0,12}[ _-]?(?:key|token|id|sig|secret)"
    r"|(?:key|token)[ _.-]?(?:type|count|id|name|path|file|order|size|length|limit|url|uri|prefix|version|fingerprint)"
    r"|tokeniz|keyboard|pagetoken|publickey|cachekey|primarykey|partitionkey"
)
PLAIN_KEY = re.compile(r"(?:^|[^a-z_-])(?:key|sid|sig|auth|signature)[\"'`\\]{0,4}\s{0,3}[=:>]")
NOT_PASSWORD_NAME = re.compile(
    r"(?:(?:by|com|tres|sur|over|under)pass|reset|forgot|pass\w{0,8}[_-]?(?:file|path|hash|stdin|min|max|len|field|reset))"
    r"\w{0,20}[\s\"':=(]{1,4}\Z"
)
COUNTED_PASS = re.compile(r"(?:[a-z]|^|\s)pass[\"']{0,2}\s{0,3}[:=]|tests? pass")  # "pass: 12, fail: 3"
MIN_LETTERS_ALONE = 16  # "the password is correcthorsebattery": no sentence goes on with such a word


def _tokens(path: Path) -> Iterator[Rule]:
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, title, keywords, regex in document["tokens"]:
        pattern = rf"(?<![A-Za-z0-9_])(?:{regex})"
        yield Rule(name, title, f"[SECRET:{name}]", pattern, tuple(keywords.split()), "long-word", holds=_is_real)
    for name, title, keyword, regex in document["inside"]:
        # The keyword may stand anywhere in it: a pattern without markers, tried where the text holds the keyword.
        holds = partial(_near, keyword=keyword)
        yield Rule(name, title, f"[SECRET:{name}]", regex, gate="long-word", group=1, holds=holds)


def _near(text: str, start: int, end: int, *, keyword: str) -> bool:
    return keyword in text and _is_real(text, start, end)


def _is_real(text: str, start: int, end: int) -> bool:
    """Return whether a token is neither `sk-xxxx...` nor a name of words with the same prefix."""
    value = text[start:end]
    if len(set(value[4:].lower())) <= 3 or any(part in value.lower() for part in NO_KEY):
        return False
    body = value.rpartition("_")[2]  # Hugging Face once made tokens of letters only, longer than any word
    return has_digit_and_letter(value[4:]) or value.isupper() or (len(body) >= 30 and body.isalpha())


# Lines of base64 with real or escaped line breaks and headers such as "Proc-Type: 4,ENCRYPTED"; the end may be missing.
# The possessive repetition never backtracks, so the time is linear.
PEM = (
    r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:\s|\\[nrt\s]|[A-Za-z0-9+/=]|[\"',.…]|(?:Proc-Type|DEK-Info|Version|Comment|Hash): [^\n\\]{1,80}+){6,20000}+"
    r"(?:-----END [A-Z0-9 ]{1,40}-----(?:\\n)?)?"
)
PUTTY = r"PuTTY-User-Key-File-\d: [\w -]{1,40}(?:\r?\n[^\n]{1,100}+){1,200}+"


def _has_key(text: str, start: int, end: int) -> bool:
    """Return whether a block holds a key and is not part of a text about keys."""
    block = text[start:end]
    if re.search(r"(?=[A-Za-z+/]{0,40}\d)[A-Za-z0-9+/=]{24}", block):
        return True
    body = block.partition("KEY")[2].partition("-----END")[0]
    return "-----END" in block and len(body) > 12 and re.search(r"[a-z] [a-z]", body) is None


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


def _password(text: str, start: int, end: int) -> bool:
    """Return whether a value may be a chosen password: no count of passed tests, no file name, no placeholder."""
    value = text[start:end].rstrip(".?)")
    name = _name_before(text, start)
    if NOT_PASSWORD_NAME.search(name) or (COUNTED_PASS.search(name) and value.isdigit()):
        return False
    return looks_chosen(value)


def _said(text: str, start: int, end: int) -> bool:
    """Return whether a word of a sentence may be a password: digits and letters, or one long word."""
    word = text[start:end].rstrip(".?)")
    letters_alone = word.isalpha() and word.islower() and len(word) >= MIN_LETTERS_ALONE
    return (looks_chosen(word) and has_digit_and_letter(word)) or letters_alone


def _strong(text: str, start: int, end: int) -> bool:
    """Return whether a value that no sign separates from its name can't be an ordinary word."""
    word = text[start:end].rstrip(".?)")
    return looks_chosen(word) and has_digit_and_letter(word) and (any(c.isupper() for c in word) or "!" in word)


def _opaque(text: str, start: int, end: int) -> bool:
    return looks_random(text[start:end])


URL_BEGINS = re.compile(r"\d{1,5}/|[^/]{0,90}//")  # a port and path, or another address: no password


def _url_password(text: str, start: int, end: int) -> bool:
    return not is_placeholder(text[start:end]) and URL_BEGINS.match(text[start:end]) is None


KEY_NAMES = word_list("key secret token credential _pat -pat _auth auth= auth: session_id sessionid signature")
PASSWORD_NAMES = word_list(
    "pass pwd kennwort contraseña senha hasło haslo wachtwoord lösenord adgangskode salasana пароль 密码 "
    "密碼 パスワード 비밀번호 parola şifre heslo jelszó κωδικός mdp"
)
QUOTES = r"[\"'`\\]{0,4}"
# name="value", name: value, name := value, name => value, <name>value
ASSIGNED = rf"{QUOTES}\s{{0,3}}(?:=>|:=|={{1,2}}|:|：|(?<!-)>)\s{{0,3}}(?:b?{QUOTES})"
IS = r"(?:is|was|are|ist|war|lautet|c['\u2019]est|est|es|era|é|e|jest|è|er|är)"
PASS_END = r"(?:word|wd|wort|ord|phrase|code|w|e)?"
VALUE = r"[^\s\"'`<>,;\\]"
_after = partial(Rule, behind=True, group=1, folded=True, flags=re.NOFLAG)
_keyed = partial(_after, "keyed", "key or token", "[SECRET:keyed]", markers=KEY_NAMES, holds=_generated)
_pass = partial(_after, "password", "password", "[SECRET:password]", markers=PASSWORD_NAMES)
_block = partial(Rule, "private-key", placeholder="[SECRET:private-key]", holds=_has_key)
SECRET_RULES: tuple[Rule, ...] = (
    _block("private key", regex=PEM, markers=("-----BEGIN ",)),
    _block("PuTTY private key", regex=PUTTY, markers=("PuTTY-User-Key-File-",)),
    *_tokens(Path(__file__).with_name("tokens.toml")),
    _after(
        *("url-password", "password in an address", "[SECRET:url-password]"),
        r"[^\s:/@\"'<>]{0,80}:([^\s/@\"'<>]{3,100}|[^\s@\"'<>]{3,100})@[\w\[]",
        ("://",),
        holds=_url_password,
    ),
    _after(
        *("bearer", "bearer token", "[SECRET:bearer]"),
        r":?\s{1,3}(?:token=)?[\"']?([\w+/.=~-]{16,2000})",
        ("bearer", "basic", "token"),
        holds=_opaque,
    ),
    _after(
        *("bearer", "credential in a header", "[SECRET:bearer]"),
        r"[\"']?\s{0,2}[:=]\s{0,2}[\"']?(?:[a-z][\w-]{1,20} )?[\"']?([\w+/.=~-]{16,2000})",
        ("authorization",),
        holds=_opaque,
    ),
    _keyed(rf"[\w.\[\]-]{{0,24}}?(?:{ASSIGNED}|\s{{1,2}}{IS}\s{{1,2}}){QUOTES}(?:bearer )?(&?{VALUE}{{12,300}})"),
    _pass(rf"[\w.\[\]-]{{0,24}}?{ASSIGNED}({VALUE}{{4,300}})", holds=_password),
    _pass(rf"{PASS_END}(?:\(|[\"']\s?,\s?)[\"']([^\"'\s]{{6,60}})[\"']", holds=_password),
    _pass(rf"{PASS_END}(?: [\w'-]{{1,20}}){{0,4}}?\s{{1,2}}{IS}:?\s{{1,2}}{QUOTES}({VALUE}{{4,300}})", holds=_said),
    _pass(rf"{PASS_END}\s{{1,2}}{QUOTES}({VALUE}{{6,300}})", holds=_strong),
)
