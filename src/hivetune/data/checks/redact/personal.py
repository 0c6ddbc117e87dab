"""The rules for personal data: cards, bank accounts, identity numbers, e-mail, phone numbers, IP and MAC addresses.

A number counts by itself when its shape and checksum leave at most one in a hundred random numbers. Any other number
counts only after a word that names it, and then without a checksum. numbers.toml lists both kinds.
"""

import datetime
import importlib
import ipaddress
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hivetune.data.checks.redact.rules import Check, Rule, word_list

RULES_FILE = Path(__file__).with_name("numbers.toml")
# First digits and lengths of the card networks (ISO/IEC 7812; their own pages).
CARD_NETWORKS = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}|"
    r"(?:6011|65\d\d|64[4-9]\d)\d{12}(?:\d{3})?|3(?:0[0-5]|[689]\d)\d{11}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14,17}|"
    r"(?:50|5[6-8]|6[37])\d{10,17}|220[0-4]\d{12}"
)
# A word in front that names another kind of number than a card's or a phone's.
OTHER_NUMBER = re.compile(
    r"(?:\b(?:id|ids|order|ref|reference|invoice|ticket|tracking|shipment|parcel|trace|span|message|article|ean|isbn|"
    r"imei|serial|timestamp|ts|row|seq|offset|event|case|item|customer|build|size|bytes|snowflake|tweet|status|account)"
    r"|_id|id)\b(?: no\.?| number| nr\.?)?[\"']?\s{0,3}[:=#]?\s{0,3}[\"']?\Z|#\Z|[=/_]\Z"
)
CARD_WORD = re.compile(
    r"card|karte|carte|tarjeta|cartão|kaart|karta|visa|master|amex|american express|maestro|unionpay|"
    r"credit|debit|\bcc\b|\bpan\b|"
    r"jcb|diners|discover|payment|kort|карт|卡号|カード"
)


def is_card(text: str, start: int, end: int) -> bool:
    """Return whether the digits are a card's: by Luhn's checksum, the network's prefix and the words in front."""
    shown = text[start:end]
    digits = digits_of(shown)
    if not begins(text, start) or len(set(digits)) == 1 or not CARD_NETWORKS.fullmatch(digits):
        return False
    if not _stdnum("luhn").is_valid(digits):
        return False
    front = text[max(0, start - 40) : start].lower()
    if CARD_WORD.search(front) or len(shown) > len(digits):
        return True
    return len(digits) in (15, 16) and OTHER_NUMBER.search(front) is None and not re.search(r"\d[\s,;]{1,3}\Z", front)


# Lengths by country, from the registry of ISO 13616.
IBAN_LENGTHS = {
    entry[:2]: int(entry[2:])
    for entry in word_list(
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 FI18 "
        "FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LI21 LT20 LU20 "
        "LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 "
        "SK24 SM27 TN24 TR26 UA29 VA22 VG24 XK20"
    )
}


def is_iban(text: str, start: int, end: int) -> bool:
    """Return whether the checksum is right. The country's structure is part of the pattern."""
    return bool(_stdnum("iban").is_valid(text[start:end], check_country=False))


def digits_of(text: str) -> str:
    """Return only the digits of `text`."""
    return "".join(c for c in text if c.isdigit())


def _stdnum(name: str) -> Any:
    """Import a module of python-stdnum when the first number needs it: it imports `ssl`, which slows each start."""
    return importlib.import_module(f"stdnum.{name}")


def _has_korean_date(text: str) -> bool:
    """Return whether a Korean number begins with a date. Numbers since 2020 have no checksum."""
    digits = digits_of(text)
    try:
        datetime.date(2000, int(digits[2:4]), int(digits[4:6]))
    except ValueError:
        return False
    return True


MONTHS = (
    r"(?:jan|feb|mar|mär|apr|may|mai|jun|jul|aug|sep|oct|okt|nov|dec|dez|janv|févr|mars|avr|juin|juil|"
    r"août|sept|déc|ene|abr|"
    r"ago|dic|gen|mag|giu|lug|set|ott|fev|fév|out)[a-zéûäç]{0,7}\.?"
)
DATE = (
    rf"\d{{1,2}}[./-]\d{{1,2}}[./-](?:19|20)?\d\d|(?:19|20)\d\d[./-]\d{{1,2}}[./-]\d{{1,2}}|"
    rf"\d{{1,2}}(?:st|nd|rd|th|\.)?(?: of| de)? {MONTHS},?(?: de)? (?:19|20)\d\d|{MONTHS} \d{{1,2}}(?:st|"
    rf"nd|rd|th)?,? (?:19|20)\d\d|"
    r"(?:19|20)\d\d年\d{1,2}月\d{1,2}日"
)
BIRTH_SIGN = r"\*\s?(\d{1,2}\.\d{1,2}\.(?:19|20)\d\d)(?!\d)"
BORN = (
    "dob|d.o.b|date of birth|date_of_birth|dateofbirth|birth date|birthdate|birthday|born|"
    "geboren|geburtsdatum|geb.|né|née|"
    "date de naissance|nacido|nacida|nacimiento|nascido|nascida|nascimento|nato il|nata il|nato a|data di nascita|"
    "geboortedatum|urodzony|urodzona|urodzenia|född|født|fødselsdato|syntynyt|生年月日|出生|생년월일|doğum|"
    "дата рождения|родился|родилась"
)

UNSPACED = "\u2e80"  # from here on: scripts without spaces between words and numbers (Chinese, Japanese, Korean)
NO_WORD_BEFORE, NO_WORD_BEHIND = r"(?<![^\W\u2e80-\uffff]|\.)", r"(?![^\W\u2e80-\uffff])"


def begins(text: str, start: int) -> bool:
    """Return whether no longer number, word, version or table row contains the place `start`.

    A lookbehind in the pattern would run at every character; this check runs only after a match.
    """
    before = text[start - 1 : start]
    if (before.isalnum() and before < UNSPACED) or (before in ("_", ".", "+", "-") and before):
        return False
    return not (before in (" ", ",") and text[start - 2 : start - 1].isdigit())


def _checksum(names: Sequence[str]) -> Check:
    """Return a check that a number begins at the place and that one of the named checksums accepts it."""

    def holds(text: str, start: int, end: int) -> bool:
        if not begins(text, start):
            return False
        number = text[start:end]
        return not names or any(
            _has_korean_date(number) if name == "date" else _stdnum(name).is_valid(number) for name in names
        )

    return holds


def _has_digits(text: str, start: int, end: int) -> bool:
    """Return whether there are at least two digits: "passport number required" has none."""
    return len(digits_of(text[start:end])) >= 2


def _rules_from(path: Path) -> Iterator[Rule]:
    """Yield the rules of numbers.toml: numbers that count by themselves, then numbers after a word."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    for rule in document["free"]:
        regex = rf"(?:{rule['regex']})(?![\w-]|[.,]\d)"
        shown, check = f"[{rule['id'].upper()}]", _checksum(rule.get("checksums", ()))
        yield Rule(rule["id"], rule["description"], shown, regex, gate="number", flags=re.ASCII, holds=check)
    for rule in document["rules"]:
        number = rf"{NO_WORD_BEFORE}({rule['regex']}){NO_WORD_BEHIND}(?!-|[.,]\d)"
        shown, keywords = f"[{rule['id'].upper()}]", "|".join(rule["keywords"])
        yield named_rule(rule["id"], rule["description"], shown, keywords, number, _has_digits)


def named_rule(name: str, title: str, placeholder: str, keywords: str, pattern: str, holds: Check | None) -> Rule:
    """Return a rule for `pattern` after one of `keywords` (lower case, separated by "|"), at most 28 chars apart."""
    # The lookahead for a digit is cheap and fails for most words that could name a number.
    behind = rf"(?=[^\d\n]{{0,34}}+\d)[^\d\n]{{0,28}}?{pattern}"
    words = tuple(keywords.split("|"))
    return Rule(name, title, placeholder, behind, words, "digits", "behind-word", 1, folded=True, holds=holds)


CARD = r"(?:\d{4}(?:[ -]\d{4}){2}[ -]\d{1,7}|\d{4}[ -]\d{6}[ -]\d{4,5}|\d{13,19})(?![\w-]|[ ]\d{4}|\.\d)"
IBAN = r"[a-z](?<![a-z\d][a-z])[a-z]\d\d(?:{})(?![a-z\d])".format(
    "|".join(rf"(?<={country}\d\d)(?:[ -]?[a-z\d]){{{length - 4}}}" for country, length in IBAN_LENGTHS.items())
)
NUMBER_RULES: tuple[Rule, ...] = (
    Rule("iban", "IBAN", "[IBAN]", IBAN, gate="number", flags=re.ASCII | re.IGNORECASE, holds=is_iban),
    Rule("card", "card number", "[CARD]", CARD, gate="number", flags=re.ASCII, holds=is_card),
    *_rules_from(RULES_FILE),
    named_rule(
        *("number-plate", "number plate", "[NUMBER-PLATE]", "car|vehicle|registration|reg|van|parked|plate"),
        rf"{NO_WORD_BEFORE}([a-z]{{2}}\d\d ?[a-z]{{3}}){NO_WORD_BEHIND}",
        lambda text, start, end: text[start:end].isupper(),
    ),
    Rule("birth-date", "date of birth", "[DATE_OF_BIRTH]", BIRTH_SIGN, ("*",), "number", "at-marker", 1),
    named_rule("birth-date", "date of birth", "[DATE_OF_BIRTH]", BORN, rf"(?<![\w.])({DATE})(?!\d)", None),
)


# E-mail. Not personal: names reserved for documentation (RFC 2606, RFC 6761), files such as icon@2x.png, and machines.
RESERVED_DOMAINS = word_list(".example.com .example.org .example.net .users.noreply.github.com .domain.com .email.com")
RESERVED_ENDS = word_list(".png .jpg .jpeg .svg .gif .webp .example .test .invalid .localhost .local")
MACHINES = word_list("git@ noreply@ no-reply@ donotreply@ postmaster@ mailer-daemon@ user@ username@ you@")
EMAIL = (
    r"(?<![\w.%+'-])\w[\w.%+'-]{0,63}(?:@|%40|\s?[\[(](?:at|@)[\])]\s?)"
    r"(?:[\w-]{1,63}(?:\.|\s?[\[(](?:dot|\.)[\])]\s?)){1,5}[^\W\d_]{2,24}(?![\w-]|\.\w)"
)


def is_email(text: str, start: int, end: int) -> bool:
    """Return whether an address can be a person's."""
    value = text[start:end].lower()
    domain = re.split(r"@|%40|[\])]\s?", value)[-1]
    if f".{domain}".endswith(RESERVED_DOMAINS) or value.endswith(RESERVED_ENDS) or value.startswith(MACHINES):
        return False
    return "://" not in text[end : end + 3]


# Phone numbers. These forms count by themselves; all others need a word in front.
SEPARATED = r"(?:[ .\u00a0()/-]{0,3}\d){%d,%d}"
INTERNATIONAL = rf"(?:\+|00(?=[1-9][\d ().-]))[1-9]\d{{0,2}}\)?{SEPARATED % (6, 13)}(?![.,]?\d)"
FREE_FORMS: tuple[tuple[str, str], ...] = (
    # North America: area code and exchange begin with 2 to 9
    (
        "us",
        r"(?:1[ .-]?)?(?:\([2-9]\d\d\)[ ]?[2-9]\d\d[ .-]\d{4}|[2-9]\d\d-[2-9]\d\d-\d{4}|"
        r"[2-9]\d\d\.[2-9]\d\d\.\d{4})(?:x\d{1,5})?",
    ),
    ("us", r"1-8(?:00|33|44|55|66|77|88)-\d{3}-\d{4}"),
    # France, Belgium, Switzerland: pairs
    ("fr", r"0[1-9](?:[ .-]\d\d){4}"),
    ("be", r"0\d{3}[ /]\d\d[ .]\d\d[ .]\d\d"),
    # Germany, Austria, the Netherlands, Sweden, Finland, Japan, Korea, Turkey, Ireland, South Africa, Britain,
    # Australia, Switzerland: a trunk 0, an area code, a sign, and 9 to 12 digits in all
    ("trunk", r"\(?0[1-9]\d{1,4}\)?[ /-]{1,3}\d{6,8}"),
    ("trunk", r"\(?0[1-9]\d{0,3}\)?[ /-]{1,2}\d{2,4}[ -]\d{2,5}(?:[ -]\d{2,4}){0,2}"),
    ("de", r"0(?:1[5-7]\d)(?:[ /-]\d\d){4}"),
    # China, where a mobile number stands between words without spaces
    ("cn", r"1[3-9]\d[- ]?\d{4}[- ]?\d{4}"),
    # Brazil, Russia, India
    ("br", r"\([1-9]\d\) ?9?\d{4}-\d{4}"),
    ("ru", r"8 ?\(?9\d\d\)? ?\d{3}[- ]\d\d[- ]\d\d"),
    ("in", r"[6-9]\d{4} \d{5}"),
)
PHONE_WORDS = (
    "phone|telephone|cel|mob.|hp:|tel|tel.|telefon|telefoon|telefono|teléfono|telefone|téléphone|tél|tél.|"
    "telefonnummer|mobile|mobil|mob|"
    "mobiltelefon|cell|cellphone|cellulare|celular|handy|handynummer|rufnummer|fax|whatsapp|gsm|portable|numéro|móvil|"
    "telemóvel|tlf|tlf.|puh|puh.|puhelin|puhelinnumero|telefonisch|erreichen|anrufen|rufen|ruf mich|call|ring|text me|"
    "contact|reach me|hotline|meine nummer|my number|appelez|joindre|llámame|chiama|bel me|zadzwoń|zadzwon|ring meg|"
    "numer|komórka|komorka|cep|cep telefonum|телефон|тел.|τηλέφωνο|phone_number|"
    "κινητό|נייד|電話|電話番号|携帯|手机|手機|电话|휴대폰|전화|טלפון"
)
NAMED_PHONE = rf"{NO_WORD_BEFORE}(\(?\+?\d{SEPARATED % (6, 14)}(?:x\d{{1,5}})?){NO_WORD_BEHIND}(?![.,]\d)"
DATE_FIRST = re.compile(r"(?:19|20)\d\d[-./]\d\d?[-./]\d|\d\d?[-./]\d\d?[-./](?:19|20)\d\d|(?:19|20)\d\d-(?:19|20)\d\d")
POINTED_PHONE = re.compile(r"\+?\(?\d{2,4}\)?(?:[. ]\d{2,4}){2,5}(?:x\d{1,5})?")
VERSION_GROUPS = re.compile(r"(?!0\d\.)\d{1,4}(?:\.\d{1,3}){2,4}")


def is_phone(text: str, start: int, end: int) -> bool:
    """Return whether there are 7 to 15 digits (E.164) that are not a date, a version or one digit repeated."""
    shown = text[start:end]
    digits = digits_of(shown)
    if not 7 <= len(digits) <= 15 or len(set(digits)) <= 2 or (shown.startswith("00") and len(digits) < 11):
        return False
    return not DATE_FIRST.match(shown.strip("( ")) and not VERSION_GROUPS.fullmatch(shown)


# Country codes of ITU-T E.164 by their first digits; other codes are not assigned.
COUNTRY_CODE = re.compile(
    r"1|7|2(?:0|7|1[1-368]|2\d|3\d|4\d|5[0-8]|6\d|9[0178])|3(?:[0-469]|5\d|7[0-8]|8[0-35-79])|"
    r"4(?:[013-9]|2[013])|5(?:[1-8]|0\d|9\d)|6(?:[0-6]|7[02-9]|8[0-35-9]|9[0-2])|8(?:[1246]|5[02356]|8[0-68])|"
    r"9(?:[0-58]|6[0-8]|7[0-79]|9[2-68])"
)


def is_international(text: str, start: int, end: int) -> bool:
    """Return whether a country code is followed by a plausible number of digits (ten in North America)."""
    shown = text[start:end]
    before = text[max(0, start - 40) : start]
    if before[-1:].isalnum():
        return False
    if shown[0] == "0" and (not begins(text, start) or before[-1:] == "/" or OTHER_NUMBER.search(before.lower())):
        return False
    digits = digits_of(shown).removeprefix("00")
    code = COUNTRY_CODE.match(digits)
    if code is None or len(set(digits)) <= 2:
        return False
    if code.group() == "1":
        return len(digits) == 11 and digits[1] not in "01"
    in_groups = len(shown) > len(digits) + 2
    return (9 if in_groups else 10) <= len(digits) <= 15


def _is_free_phone(text: str, start: int, end: int) -> bool:
    return begins(text, start) and text[start - 1 : start] != "/" and is_phone(text, start, end)


def _is_chinese_mobile(text: str, start: int, end: int) -> bool:
    """Return whether the number is beside text without spaces and not after a word for an order or serial number."""
    front = text[max(0, start - 4) : start]
    beside = front[-1:] >= UNSPACED or text[end : end + 1] >= UNSPACED
    return beside and not re.search("单号|订单|编号|訂單|番号", front) and _is_free_phone(text, start, end)


def _is_trunk(text: str, start: int, end: int) -> bool:
    digits = len(digits_of(text[start:end]))
    front = text[max(0, start - 40) : start].lower()
    return 9 <= digits <= 12 and _is_free_phone(text, start, end) and OTHER_NUMBER.search(front) is None


def _is_named_phone(text: str, start: int, end: int) -> bool:
    """Return whether a number after a phone word is one: a point between short groups makes a version or an amount."""
    pointed = "." in text[start:end].replace(". ", "")
    return is_phone(text, start, end) and (not pointed or POINTED_PHONE.fullmatch(text, start, end) is not None)


# IP addresses. Private and documentation ranges (RFC 1918, 5737, 3849, 6598) and public resolvers identify no machine.
# Addresses in private ranges are personal only behind a word that names their owner.
QUAD = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = rf"(?<![\w.@-])(?<!/)(?<!v)({QUAD}(?:\.{QUAD}){{3}})(?![\w-]|\.\d|/\d)"
IPV4_BEHIND = rf"(?:@|//)({QUAD}(?:\.{QUAD}){{3}})(?![\w-]|\.\d|/\d\d?\b)"
IPV6 = r"(?<![\w:.])((?:[0-9A-Fa-f]{1,4}:){1,7}(?::?[0-9A-Fa-f]{1,4}){1,7}|(?:[0-9A-Fa-f]{1,4}:){2,7}:)(?![\w:])"
OWNER_WORDS = re.compile(
    r"\bip\b|ip.?address|ip-adresse|adresse ip|client|remote|visitor|forwarded|real-ip|\bhis\b|\bher\b|"
    r"\bmy\b|customer|laptop"
)
VERSION_WORDS = re.compile(
    r"(?:version|release|upgrade|build|section|chapter|firmware|driver|\bv|"
    r"[=<>~^]=)\W{0,3}[\w.]{0,12}\W{0,4}\Z"
)
WELL_KNOWN = word_list(
    "8.8.8.8 8.8.4.4 1.1.1.1 1.0.0.1 9.9.9.9 208.67.222.222 208.67.220.220 114.114.114.114 1.2.3.4 123.45.67.89"
)
# Four numbers below this are nearly always a version or a section; only one in 256 addresses looks so.
SMALL = 64
GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")


def is_personal_ipv4(text: str, start: int, end: int) -> bool:
    """Return whether an address identifies a machine and is not a version number."""
    value = text[start:end]
    address = ipaddress.ip_address(value)
    front = text[max(0, start - 40) : start].lower()
    if value in WELL_KNOWN or address.is_loopback or address.is_unspecified or address.is_multicast:
        return False
    owned = OWNER_WORDS.search(front.rpartition("\n")[2]) is not None
    if not address.is_global:
        return owned and int(value.split(".")[3]) not in (0, 1, 255) and not value.startswith(("255.", "0."))
    if VERSION_WORDS.search(front):
        return False
    return owned or max(int(part) for part in value.split(".")) >= SMALL


def is_personal_ipv6(text: str, start: int, end: int) -> bool:
    """Return whether an address is global, or link-local with a MAC address in it."""
    try:
        address = ipaddress.IPv6Address(text[start:end])
    except ValueError:
        return False
    if address in GLOBAL_IPV6:
        return address.is_global
    # A link-local address holds the card's MAC address where its middle is ff:fe (RFC 4291, appendix A).
    return address.is_link_local and address.packed[11:13] == b"\xff\xfe"


MAC = (
    r"(?<![\w:.-])(?:[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}|[0-9A-Fa-f]{2}(?:-[0-9A-Fa-f]{2}){5}|"
    r"[0-9A-Fa-f]{4}(?:\.[0-9A-Fa-f]{4}){2})(?![\w:-]|\.\w)"
)


def is_mac(text: str, start: int, end: int) -> bool:
    """Return whether an address is not multicast. Without colons it needs a letter, or it may be a date."""
    value = text[start:end].lower()
    plain = re.sub(r"[^0-9a-f]", "", value)
    if len(set(plain)) <= 2 or int(plain[1], 16) & 1:
        return False
    return ":" in value or (any(c.isalpha() for c in plain) and any(c.isdigit() for c in plain))


# "anna dot schmidt at posteo dot de"
SPOKEN_EMAIL = (
    r"(?<![\w.])([a-z][\w.+-]{0,40}(?: dot [\w+-]{1,30}){0,3} at [a-z][\w-]{1,40}(?: dot [a-z]{2,20}){0,2}"
    r" dot (?:[a-z]{2}|com|org|net|edu|info))(?![\w-])"
)
MAIL_PROVIDERS = re.compile(
    r" at (?:gmail|googlemail|gmx|web|posteo|mailbox|outlook|hotmail|live|yahoo|icloud|proton\w{0,8}|aol) "
)


def _is_spoken_email(text: str, start: int, end: int) -> bool:
    """Return whether the name has two parts or the provider is well known: "look at the dot com" is not an address."""
    value = text[start:end].lower()
    return " dot " in value.partition(" at ")[0] or MAIL_PROVIDERS.search(value) is not None


_email = partial(Rule, "email", "e-mail address", "[EMAIL]")
_ip = partial(Rule, "ip", "IP address", "[IP]", gate="address", group=1)
_phone = partial(Rule, "phone", "phone number", "[PHONE]", gate="number")
CONTACT_RULES: tuple[Rule, ...] = (
    _email(EMAIL, ("@", "%40", "(at)", "[at]"), holds=is_email),
    _email(SPOKEN_EMAIL, (" dot ",), group=1, folded=True, holds=_is_spoken_email),
    _ip(IPV4, flags=re.ASCII, holds=is_personal_ipv4),
    _ip(IPV4_BEHIND, ("@", "//"), flags=re.ASCII, holds=is_personal_ipv4),
    _ip(IPV6, (":",), holds=is_personal_ipv6),
    Rule("mac", "MAC address", "[MAC]", MAC, gate="address", holds=is_mac),
)
PHONE_RULES: tuple[Rule, ...] = (
    _phone(INTERNATIONAL, ("+", "00"), holds=is_international),
    *(
        _phone(
            rf"(?:{form}){NO_WORD_BEHIND}(?!-|[.,/:]\w|[ ]\d)",
            holds={"trunk": _is_trunk, "cn": _is_chinese_mobile}.get(country, _is_free_phone),
        )
        for country, form in FREE_FORMS
    ),
    named_rule("phone", "phone number", "[PHONE]", PHONE_WORDS, NAMED_PHONE, _is_named_phone),
)
