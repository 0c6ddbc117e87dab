"""The rules for personal data: mail addresses, international phone numbers, IBAN, payment cards, public IP addresses.

A number counts by its shape and checksum, so that at most one in a hundred random numbers is taken for one.
"""

import ipaddress
import re

from hivetune.data.checks.redact.rules import Rule, word_list

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
    r"card|karte|carte|tarjeta|cartão|kaart|karta|visa|master|amex|maestro|unionpay|credit|debit|\bcc\b|jcb|diners|"
    r"discover|payment"
)
CARD = r"(?:\d{4}(?:[ -]\d{4}){2}[ -]\d{1,7}|\d{4}[ -]\d{6}[ -]\d{4,5}|\d{13,19})(?![\w-]|[ ]\d{4}|\.\d)"


def is_card(text: str, start: int, end: int) -> bool:
    """Return whether the digits are a card's: by Luhn's checksum, the network's prefix and the words in front."""
    shown = text[start:end]
    digits = digits_of(shown)
    if not begins(text, start) or len(set(digits)) == 1 or not CARD_NETWORKS.fullmatch(digits) or not _luhn(digits):
        return False
    front = text[max(0, start - 40) : start].lower()
    if CARD_WORD.search(front) or len(shown) > len(digits):
        return True
    return len(digits) in (15, 16) and OTHER_NUMBER.search(front) is None and not re.search(r"\d[\s,;]{1,3}\Z", front)


def _luhn(digits: str) -> bool:
    """Return whether the checksum of ISO/IEC 7812 holds."""
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0


# Lengths by country, from the registry of ISO 13616.
IBAN_LENGTHS = {
    entry[:2]: int(entry[2:])
    for entry in word_list(
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 "
        "ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 "
        "LB28 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 "
        "RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 TN24 TR26 UA29 VA22 VG24 XK20"
    )
}
IBAN = r"[a-z](?<![a-z\d][a-z])[a-z]\d\d(?:{})(?![a-z\d])".format(
    "|".join(rf"(?<={country}\d\d)(?:[ -]?[a-z\d]){{{length - 4}}}" for country, length in IBAN_LENGTHS.items())
)


def is_iban(text: str, start: int, end: int) -> bool:
    """Return whether the checksum of ISO 13616 is right. The country's length is part of the pattern."""
    value = re.sub(r"[ -]", "", text[start:end])
    return int("".join(str(int(c, 36)) for c in value[4:] + value[:4])) % 97 == 1


def digits_of(text: str) -> str:
    return "".join(c for c in text if c.isdigit())


def begins(text: str, start: int) -> bool:
    """Return whether no longer number, word, version or table row contains the place `start`."""
    before = text[start - 1 : start]
    if (before.isalnum() and before.isascii()) or (before and before in "_.+-"):
        return False
    return not (before and before in " ," and text[start - 2 : start - 1].isdigit())


# E-mail. Not personal: names reserved for documentation (RFC 2606, RFC 6761), files such as icon@2x.png, and machines.
RESERVED_DOMAINS = (
    ".example.com",
    ".example.org",
    ".example.net",
    ".users.noreply.github.com",
    ".domain.com",
    ".email.com",
)
RESERVED_ENDS = word_list(".png .jpg .jpeg .svg .gif .webp .example .test .invalid .localhost .local")
MACHINES = word_list("git@ noreply@ no-reply@ donotreply@ postmaster@ mailer-daemon@ user@ username@ you@")
EMAIL = (
    r"(?<![\w.%+'-])\w[\w.%+'-]{0,63}(?:@|%40|\s?[\[(](?:at|@)[\])]\s?)"
    r"(?:[\w-]{1,63}(?:\.|\s?[\[(](?:dot|\.)[\])]\s?)){1,5}[^\W\d_]{2,24}(?![\w-]|\.\w)"
)
EMAIL_SIGN = re.compile(r"@|%40|[\[(]at[\])]", re.IGNORECASE)


def is_email(text: str, start: int, end: int) -> bool:
    """Return whether an address can be a person's."""
    value = text[start:end].lower()
    domain = re.split(r"@|%40|[\])]\s?", value)[-1]
    if f".{domain}".endswith(RESERVED_DOMAINS) or value.endswith(RESERVED_ENDS) or value.startswith(MACHINES):
        return False
    return "://" not in text[end : end + 3]


# Country codes of ITU-T E.164 by their first digits; other codes are not assigned.
COUNTRY_CODE = re.compile(
    r"1|7|2(?:0|7|1[1-368]|2\d|3\d|4\d|5[0-8]|6\d|9[0178])|3(?:[0-469]|5\d|7[0-8]|8[0-35-79])|"
    r"4(?:[013-9]|2[013])|5(?:[1-8]|0\d|9\d)|6(?:[0-6]|7[02-9]|8[0-35-9]|9[0-2])|8(?:[1246]|5[02356]|8[0-68])|"
    r"9(?:[0-58]|6[0-8]|7[0-79]|9[2-68])"
)
PHONE = r"(?:\+|00(?=[1-9][\d ().-]))[1-9]\d{0,2}\)?(?:[ .\u00a0()/-]{0,3}\d){6,13}(?![.,]?\d)"


def is_phone(text: str, start: int, end: int) -> bool:
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


# Public IP addresses. Private and documentation ranges (RFC 1918, 5737, 3849, 6598) and resolvers identify no machine.
QUAD = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = rf"(?:(?<![\w.@/-])|(?<=//)|(?<=@))({QUAD}(?:\.{QUAD}){{3}})(?![\w-]|\.\d|/\d)"
IPV6 = r"(?<![\w:.])((?:[0-9A-Fa-f]{1,4}:){1,7}(?::?[0-9A-Fa-f]{1,4}){1,7}|(?:[0-9A-Fa-f]{1,4}:){2,7}:)(?![\w:])"
OWNER_WORDS = re.compile(r"\bip\b|ip.?address|ip-adresse|adresse ip|client|remote|visitor|forwarded|real-ip|\bmy\b")
VERSION_WORDS = re.compile(
    r"(?:version|release|upgrade|build|section|chapter|firmware|driver|\bv|[=<>~^]=)\W{0,3}[\w.]{0,12}\W{0,4}\Z"
)
WELL_KNOWN = frozenset(
    word_list(
        "8.8.8.8 8.8.4.4 1.1.1.1 1.0.0.1 9.9.9.9 208.67.222.222 208.67.220.220 114.114.114.114 1.2.3.4 123.45.67.89"
    )
)
# Four numbers below this are nearly always a version or a section; only one in 256 addresses looks so.
SMALL = 64
GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")


def is_public_ipv4(text: str, start: int, end: int) -> bool:
    """Return whether an address identifies a machine on the Internet and is not a version number."""
    value = text[start:end]
    front = text[max(0, start - 40) : start].lower()
    if value in WELL_KNOWN or not ipaddress.ip_address(value).is_global or VERSION_WORDS.search(front):
        return False
    owned = OWNER_WORDS.search(front.rpartition("\n")[2]) is not None
    return owned or max(int(part) for part in value.split(".")) >= SMALL


def is_public_ipv6(text: str, start: int, end: int) -> bool:
    try:
        address = ipaddress.IPv6Address(text[start:end])
    except ValueError:
        return False
    return address in GLOBAL_IPV6 and address.is_global


PERSONAL_RULES: tuple[Rule, ...] = (
    Rule("email", "e-mail address", "[EMAIL]", EMAIL, flags=re.NOFLAG, holds=is_email, needs=EMAIL_SIGN),
    Rule("ip", "IP address", "[IP]", IPV4, gate="digits", group=1, holds=is_public_ipv4, needs=re.compile(r"\d\.\d")),
    Rule(
        "ip", "IP address", "[IP]", IPV6, group=1, holds=is_public_ipv6, needs=re.compile(r"[0-9A-Fa-f]:[0-9A-Fa-f:]")
    ),
    Rule(
        "iban",
        "IBAN",
        "[IBAN]",
        IBAN,
        gate="digits",
        flags=re.ASCII | re.IGNORECASE,
        holds=is_iban,
        needs=re.compile(r"[A-Za-z]{2}\d\d[ -]?[A-Za-z\d]"),
    ),
    Rule("card", "card number", "[CARD]", CARD, gate="digits", holds=is_card, needs=re.compile(r"\d{4}[ -]?\d{4}")),
    Rule(
        "phone",
        "phone number",
        "[PHONE]",
        PHONE,
        gate="digits",
        flags=re.NOFLAG,
        holds=is_phone,
        needs=re.compile(r"[+]|00"),
    ),
)
