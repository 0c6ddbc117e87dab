"""How a person or a machine of theirs is reached: e-mail addresses, phone numbers, IP and MAC addresses."""

import ipaddress
import re

from hivetune.data.checks.redact.numbers import (
    NO_WORD_BEFORE,
    NO_WORD_BEHIND,
    OTHER_NUMBER,
    UNSPACED,
    begins,
    digits_of,
    named_rule,
)
from hivetune.data.checks.redact.rules import Check, Rule

# RFC 2606 and RFC 6761: names that documentation uses; files such as icon@2x.png; mail of machines.
RESERVED_DOMAINS = ("example.com", "example.org", "example.net", "users.noreply.github.com", "domain.com", "email.com")
RESERVED_ENDS = (
    ".png",
    ".jpg",
    ".jpeg",
    ".svg",
    ".gif",
    ".webp",
    ".example",
    ".test",
    ".invalid",
    ".localhost",
    ".local",
)
MACHINES = (
    "git@",
    "noreply@",
    "no-reply@",
    "donotreply@",
    "postmaster@",
    "mailer-daemon@",
    "user@",
    "username@",
    "you@",
)
EMAIL = (
    r"(?<![\w.%+'-])\w[\w.%+'-]{0,63}(?:@|%40|\s?[\[(](?:at|@)[\])]\s?)"
    r"(?:[\w-]{1,63}(?:\.|\s?[\[(](?:dot|\.)[\])]\s?)){1,5}[^\W\d_]{2,24}(?![\w-]|\.\w)"
)


def is_email(text: str, start: int, end: int) -> bool:
    value = text[start:end].lower()
    domain = re.split(r"@|%40|[\])]\s?", value)[-1]
    if domain in RESERVED_DOMAINS or value.endswith(RESERVED_ENDS) or value.startswith(MACHINES):
        return False
    return (
        not any(domain.endswith("." + reserved) for reserved in RESERVED_DOMAINS) and "://" not in text[end : end + 3]
    )


# Phone numbers. Forms that stand for themselves; everything else needs a word in front.
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
VERSION_GROUPS = re.compile(r"(?!0\d\.)\d{1,4}(?:\.\d{1,3}){2,4}")


def is_phone(text: str, start: int, end: int) -> bool:
    """Seven to fifteen digits (E.164), not all alike; not a date, a version or one of several columns of a table."""
    shown = text[start:end]
    digits = digits_of(shown)
    if not 7 <= len(digits) <= 15 or len(set(digits)) <= 2 or (shown.startswith("00") and len(digits) < 11):
        return False
    return not DATE_FIRST.match(shown.strip("( ")) and not VERSION_GROUPS.fullmatch(shown)


# ITU-T E.164: the codes of countries by their first digits; the rest is not assigned.
COUNTRY_CODE = re.compile(
    r"1|7|2(?:0|7|1[1-368]|2\d|3\d|4\d|5[0-8]|6\d|9[0178])|3(?:[0-469]|5\d|7[0-8]|8[0-35-79])|"
    r"4(?:[013-9]|2[013])|5(?:[1-8]|0\d|9\d)|6(?:[0-6]|7[02-9]|8[0-35-9]|9[0-2])|8(?:[1246]|5[02356]|8[0-68])|"
    r"9(?:[0-58]|6[0-8]|7[0-79]|9[2-68])"
)


def is_international(text: str, start: int, end: int) -> bool:
    """A country's code and as many digits as its numbers have; North America's have ten."""
    shown = text[start:end]
    if text[start - 1 : start].isalnum() or (shown[0] == "0" and not begins(text, start)):
        return False
    if shown[0] == "0" and (
        text[start - 1 : start] == "/" or OTHER_NUMBER.search(text[max(0, start - 40) : start].lower())
    ):
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
    """Beside a character of a script without spaces, and not behind the word for an order or a serial number."""
    front = text[max(0, start - 4) : start]
    beside = front[-1:] >= UNSPACED or text[end : end + 1] >= UNSPACED
    return beside and not re.search("单号|订单|编号|訂單|番号", front) and _is_free_phone(text, start, end)


def _is_trunk(text: str, start: int, end: int) -> bool:
    digits = len(digits_of(text[start:end]))
    front = text[max(0, start - 40) : start].lower()
    return 9 <= digits <= 12 and _is_free_phone(text, start, end) and OTHER_NUMBER.search(front) is None


def _is_named_phone(text: str, start: int, end: int) -> bool:
    """With points only between groups of at least two digits, or it is a version or an amount."""
    pointed = "." in text[start:end].replace(". ", "")
    return is_phone(text, start, end) and (not pointed or POINTED_PHONE.fullmatch(text, start, end) is not None)


POINTED_PHONE = re.compile(r"\+?\(?\d{2,4}\)?(?:[. ]\d{2,4}){2,5}(?:x\d{1,5})?")


def _phone(form: str, holds: Check) -> Rule:
    guarded = re.compile(rf"(?:{form}){NO_WORD_BEHIND}(?!-|[.,/:]\w|[ ]\d)")
    return Rule("phone", "phone number", "[PHONE]", guarded, gate="number", holds=holds)


# IP addresses. What stands for no one machine in the world: RFC 1918, 5737, 3849, 6598 and the like, and public
# resolvers. They are personal only behind a word that says whose they are.
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
WELL_KNOWN = frozenset(
    [
        "8.8.8.8",
        "8.8.4.4",
        "1.1.1.1",
        "1.0.0.1",
        "9.9.9.9",
        "208.67.222.222",
        "208.67.220.220",
        "114.114.114.114",
        "1.2.3.4",
        "123.45.67.89",
    ]
)
# An address whose numbers are all small is nearly always a version or a section: one in 256 addresses is so.
SMALL = 64


def is_personal_ipv4(text: str, start: int, end: int) -> bool:
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


GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")


def is_personal_ipv6(text: str, start: int, end: int) -> bool:
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
    """Not broadcast or multicast; where the form is also that of dates and decimals, with a letter."""
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
    """With a name of two parts, or of a provider that many people have: "look at the dot com" is none."""
    value = text[start:end].lower()
    name = value.partition(" at ")[0]
    return " dot " in name or MAIL_PROVIDERS.search(value) is not None


CONTACT_RULES: tuple[Rule, ...] = (
    Rule("email", "e-mail address", "[EMAIL]", re.compile(EMAIL), ("@", "%40", "(at)", "[at]"), holds=is_email),
    Rule(
        "email",
        "e-mail address",
        "[EMAIL]",
        re.compile(SPOKEN_EMAIL),
        (" dot ",),
        group=1,
        folded=True,
        holds=_is_spoken_email,
    ),
    Rule("ip", "IP address", "[IP]", re.compile(IPV4, re.ASCII), gate="address", group=1, holds=is_personal_ipv4),
    Rule(
        "ip",
        "IP address",
        "[IP]",
        re.compile(IPV4_BEHIND, re.ASCII),
        ("@", "//"),
        "address",
        group=1,
        holds=is_personal_ipv4,
    ),
    Rule("ip", "IP address", "[IP]", re.compile(IPV6), (":",), "address", group=1, holds=is_personal_ipv6),
    Rule("mac", "MAC address", "[MAC]", re.compile(MAC), gate="address", holds=is_mac),
)
PHONE_RULES: tuple[Rule, ...] = (
    Rule(
        "phone",
        "phone number",
        "[PHONE]",
        re.compile(INTERNATIONAL),
        ("+", "00"),
        gate="number",
        holds=is_international,
    ),
    *(
        _phone(form, {"trunk": _is_trunk, "cn": _is_chinese_mobile}.get(country, _is_free_phone))
        for country, form in FREE_FORMS
    ),
    named_rule("phone", "phone number", "[PHONE]", PHONE_WORDS, NAMED_PHONE, _is_named_phone),
)
