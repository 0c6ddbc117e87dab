"""The conditions under which a value that a rule matched counts as a secret or as personal data (redaction.toml).

No rule fires on a high-entropy word alone, because such a rule fires in every other line of prose. A secret has a known
prefix (AKIA, ghp_) or follows a name such as `password=`; a number is personal by its shape and checksum, so that at
most one in a hundred random numbers is taken for one.
"""

import ipaddress
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

Check = Callable[[str, int, int], bool]  # (text, start, end) -> whether it is a find
TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("redaction.toml").read_text(encoding="utf-8"))
WORDS = {name: tuple(words.split()) for name, words in TABLE["words"].items()}

# A value
STANDS_IN = re.compile(  # a variable, code or a path, made of words and at most two digits at its end
    r"(?:[$%@&(~/*]|(?:none|null|true|false|undefined|os|env|process|self|config|settings|secrets|vault|get|fetch|read|"
    r"fake|dummy|sample|test)(?![a-z]{0,3}\d))[$({]{0,2}[A-Za-z_./:%-]{0,80}\d{0,2}[()})%s]{0,3}",
    re.IGNORECASE,
)
CODE_SIGNS = re.compile(r"[(){}<>\[\];\\]|\w\.\w{3,20}\.\w")
IDENTIFIER = re.compile(
    r"(?:\d{0,4}[A-Z]{0,2}[a-z]{3,20}[\d_.-]{0,4}){2,12}(?:[A-Z]?[a-z]{0,2}\d?)|[A-Z]{2,20}(?:_[A-Z\d]{1,20}){1,8}"
)
# Measured on identifiers of the standard library: 99 % lie below 3.2 bits. 20 random characters of base 62 have 3.9.
ENTROPY_BITS = 3.3
MAX_LOOKED_AT = 200  # characters of a value whose entropy is counted
# The name before it. next_page_token, primary_key and the like name no secret.
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
URL_BEGINS = re.compile(r"\d{1,5}/|[^/]{0,90}//")  # a port and path, or another address: no password
# A number
OTHER_NUMBER = re.compile(  # a word in front that names another kind of number than a card's or a phone's
    r"(?:\b(?:id|ids|order|ref|reference|invoice|ticket|tracking|shipment|parcel|trace|span|message|article|ean|isbn|"
    r"imei|serial|timestamp|ts|row|seq|offset|event|case|item|customer|build|size|bytes|snowflake|tweet|status|account)"
    r"|_id|id)\b(?: no\.?| number| nr\.?)?[\"']?\s{0,3}[:=#]?\s{0,3}[\"']?\Z|#\Z|[=/_]\Z"
)
CARD_WORD = re.compile(
    r"card|karte|carte|tarjeta|cartão|kaart|karta|visa|master|amex|maestro|unionpay|credit|debit|\bcc\b|jcb|diners|"
    r"discover|payment"
)
CARD_NETWORK = re.compile(r"4|5[0-8]|2[2-7]|3[04-9]|6")  # first digits (ISO/IEC 7812)
OWNER_WORDS = re.compile(r"\bip\b|ip.?address|ip-adresse|adresse ip|client|remote|visitor|forwarded|real-ip|\bmy\b")
VERSION_WORDS = re.compile(
    r"(?:version|release|upgrade|build|section|chapter|firmware|driver|\bv|[=<>~^]=)\W{0,3}[\w.]{0,12}\W{0,4}\Z"
)
# Four numbers below this are nearly always a version or a section; only one in 256 addresses looks so.
SMALL = 64
GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")


def has_digit_and_letter(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isascii() and c.isalpha() for c in value)


def is_placeholder(value: str) -> bool:
    """Return whether a text only stands in for a value: your_key_here, ${TOKEN}, xxxx, or code that reads one."""
    lower = value.lower()
    if lower.startswith(WORDS["placeholder_starts"]) or lower.strip(".,!?:") in WORDS["placeholder_words"]:
        return True
    if STANDS_IN.fullmatch(value) or (value[0] in "/~." and value.count("/") > 1):
        return True
    return any(part in lower for part in WORDS["placeholder_parts"]) or len(set(lower)) <= 3


def has_code_signs(value: str) -> bool:
    """Return whether a value looks like code, because it has brackets or attribute access. A leading "(" is allowed."""
    return CODE_SIGNS.search(value.removeprefix("(") if ")" not in value else value) is not None


def looks_random(value: str) -> bool:
    """Return whether a value seems generated: letters and digits of high entropy, no identifier or placeholder."""
    if not has_digit_and_letter(value) or is_placeholder(value) or has_code_signs(value):
        return False
    shown = value[:MAX_LOOKED_AT]
    shares = [shown.count(c) / len(shown) for c in set(shown)]
    return IDENTIFIER.fullmatch(value) is None and -sum(p * math.log2(p) for p in shares) >= ENTROPY_BITS


def looks_chosen(value: str) -> bool:
    """Return whether a person may have chosen the value as a password: letters with digits or signs, or six digits."""
    if is_placeholder(value) or has_code_signs(value):
        return False
    digits, letters = sum(c.isdigit() for c in value), sum(c.isalpha() for c in value)
    signs = len(value) - digits - letters
    if letters == 0:
        return digits >= 6 and signs <= 2
    if digits == signs == 0:
        return sum(a.islower() and b.isupper() for a, b in pairwise(value)) >= 3
    return digits > 0 or (signs > 0 and any(c in "!@#$%^&*+=?" for c in value) and any(c.isupper() for c in value))


def is_token(text: str, start: int, end: int) -> bool:
    """Return whether the match is a real token: no placeholder such as `sk-xxxx`, no identifier of plain words."""
    value = text[start:end]
    if len(set(value[4:].lower())) <= 3 or any(part in value.lower() for part in WORDS["no_key"]):
        return False
    body = value.rpartition("_")[2]  # Hugging Face once made tokens of letters only, longer than any word
    return has_digit_and_letter(value[4:]) or value.isupper() or (len(body) >= 30 and body.isalpha())


def _is_key_block(text: str, start: int, end: int) -> bool:
    """Return whether a block contains a key and is not part of a text about keys."""
    block = text[start:end]
    if re.search(r"(?=[A-Za-z+/]{0,40}\d)[A-Za-z0-9+/=]{24}", block):
        return True
    body = block.partition("KEY")[2].partition("-----END")[0]
    return "-----END" in block and len(body) > 12 and re.search(r"[a-z] [a-z]", body) is None


def _name_before(text: str, start: int) -> str:
    """Return the text before a value, as far back as its name may begin, in lower case."""
    return text[max(0, start - 60) : start].lower()


def _is_generated(text: str, start: int, end: int) -> bool:
    """Return whether a value seems random and its name can be a secret's."""
    value = text[start:end].rstrip(".!?)")
    name = re.split(r"[;,&{(\n]", _name_before(text, start))[-1]
    if NOT_SECRET_NAME.search(name[-48:]) or not looks_random(value):
        return False
    if PLAIN_KEY.search(name):
        return len(value) >= 20 and ":" not in value and not value.startswith("sha")
    return not value.startswith(("sha256", "sha512", "sha1-", "http", "arn:"))


def _is_password(text: str, start: int, end: int) -> bool:
    """Return whether a value may be a chosen password: no count of passed tests, no file name, no placeholder."""
    value, name = text[start:end].rstrip(".?)"), _name_before(text, start)
    if NOT_PASSWORD_NAME.search(name) or (COUNTED_PASS.search(name) and value.isdigit()):
        return False
    return looks_chosen(value)


def _is_said(text: str, start: int, end: int) -> bool:
    """Return whether a word of a sentence may be a password: it has digits and letters, or is one long word."""
    word = text[start:end].rstrip(".?)")
    letters_alone = word.isalpha() and word.islower() and len(word) >= MIN_LETTERS_ALONE
    return (looks_chosen(word) and has_digit_and_letter(word)) or letters_alone


def _is_strong(text: str, start: int, end: int) -> bool:
    """Return whether a value that no sign separates from its name is too random to be an ordinary word."""
    word = text[start:end].rstrip(".?)")
    return looks_chosen(word) and has_digit_and_letter(word) and (any(c.isupper() for c in word) or "!" in word)


def _is_opaque(text: str, start: int, end: int) -> bool:
    return looks_random(text[start:end])


def _is_url_password(text: str, start: int, end: int) -> bool:
    return not is_placeholder(text[start:end]) and URL_BEGINS.match(text[start:end]) is None


def _begins(text: str, start: int) -> bool:
    """Return whether a number can begin at `start`, not inside a longer one, a word, a version or a row of a table."""
    before = text[start - 1 : start]
    if (before.isalnum() and before.isascii()) or (before and before in "_.+-"):
        return False
    return not (before and before in " ," and text[start - 2 : start - 1].isdigit())


def _is_card(text: str, start: int, end: int) -> bool:
    """Return whether the digits are a card's: by Luhn's checksum, the network's prefix and the words in front."""
    shown = text[start:end]
    digits = shown.replace(" ", "").replace("-", "")
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    if (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 or len(set(digits)) == 1:
        return False
    if not _begins(text, start) or not CARD_NETWORK.match(digits):
        return False
    front = text[max(0, start - 40) : start].lower()
    if CARD_WORD.search(front) or len(shown) > len(digits):
        return True
    return len(digits) in (15, 16) and OTHER_NUMBER.search(front) is None and not re.search(r"\d[\s,;]{1,3}\Z", front)


def _is_iban(text: str, start: int, end: int) -> bool:
    """Return whether the remainder by 97 is that of ISO 13616."""
    value = re.sub(r"[ -]", "", text[start:end])
    return int("".join(str(int(c, 36)) for c in value[4:] + value[:4])) % 97 == 1


def _is_email(text: str, start: int, end: int) -> bool:
    """Return whether an address can be a person's."""
    value = text[start:end].lower()
    domain = re.split(r"@|%40|[\])]\s?", value)[-1]
    if f".{domain}".endswith(WORDS["reserved_domains"]) or value.endswith(WORDS["reserved_ends"]):
        return False
    return not value.startswith(WORDS["machines"]) and "://" not in text[end : end + 3]


def _is_phone(text: str, start: int, end: int) -> bool:
    """Return whether a plausible number of digits (ITU-T E.164; eleven in North America) follows + or 00."""
    shown = text[start:end]
    before = text[max(0, start - 40) : start]
    if before[-1:].isalnum():
        return False
    if shown[0] == "0" and (not _begins(text, start) or before[-1:] == "/" or OTHER_NUMBER.search(before.lower())):
        return False
    digits = "".join(c for c in shown if c.isdigit()).removeprefix("00")
    if len(set(digits)) <= 2:
        return False
    if digits[0] == "1":
        return len(digits) == 11 and digits[1] not in "01"
    in_groups = len(shown) > len(digits) + 2
    return (9 if in_groups else 10) <= len(digits) <= 15


def _is_public_ipv4(text: str, start: int, end: int) -> bool:
    """Return whether an address identifies a machine on the Internet and is not a version number.

    Private and documentation ranges (RFC 1918, 5737, 3849, 6598) identify none.
    """
    value = text[start:end]
    front = text[max(0, start - 40) : start].lower()
    if value in WORDS["known_addresses"] or not ipaddress.ip_address(value).is_global or VERSION_WORDS.search(front):
        return False
    owned = OWNER_WORDS.search(front.rpartition("\n")[2]) is not None
    return owned or max(int(part) for part in value.split(".")) >= SMALL


def _is_public_ipv6(text: str, start: int, end: int) -> bool:
    try:
        address = ipaddress.IPv6Address(text[start:end])
    except ValueError:
        return False
    return address in GLOBAL_IPV6 and address.is_global


CHECKS: Mapping[str, Check] = {
    "key_block": _is_key_block,
    "url_password": _is_url_password,
    "opaque": _is_opaque,
    "generated": _is_generated,
    "password": _is_password,
    "said": _is_said,
    "strong": _is_strong,
    "email": _is_email,
    "public_ipv4": _is_public_ipv4,
    "public_ipv6": _is_public_ipv6,
    "iban": _is_iban,
    "card": _is_card,
    "phone": _is_phone,
}
