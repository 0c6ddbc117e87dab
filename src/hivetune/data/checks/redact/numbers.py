"""Numbers that name a person or an account: cards, bank accounts, identity numbers of 30 countries, as data.

A number stands for itself (FREE) when its shape and its checksum leave at most one in a hundred random numbers; else it
counts only behind a word that names it (numbers.toml), and then without a checksum: who writes "PESEL" in front means
one.
"""

import datetime
import importlib
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hivetune.data.checks.redact.rules import Check, Rule

Sum = Callable[[str], bool]  # of a number's characters


# First digits and lengths of the card networks (ISO/IEC 7812; their own pages).
CARD_NETWORKS = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}|"
    r"(?:6011|65\d\d|64[4-9]\d)\d{12}(?:\d{3})?|3(?:0[0-5]|[689]\d)\d{11}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14,17}|"
    r"(?:50|5[6-8]|6[37])\d{10,17}|220[0-4]\d{12}"
)
# A word in front that says what kind of number this is, if not a card's.
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
    shown = text[start:end]
    digits = digits_of(shown)
    if not begins(text, start):
        return False
    if len(set(digits)) == 1 or not _stdnum("luhn").is_valid(digits) or not CARD_NETWORKS.fullmatch(digits):
        return False
    front = text[max(0, start - 40) : start].lower()
    if CARD_WORD.search(front) or len(shown) > len(digits):
        return True
    return len(digits) in (15, 16) and OTHER_NUMBER.search(front) is None and not re.search(r"\d[\s,;]{1,3}\Z", front)


# ISO 13616, the registry's lengths.
IBAN_LENGTHS = {
    **{"AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BR": 29, "BY": 28},
    **{"CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "DO": 28, "EE": 20, "EG": 29, "ES": 24, "FI": 18},
    **{"FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28, "HR": 21, "HU": 28, "IE": 22},
    **{"IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28, "LI": 21, "LT": 20, "LU": 20},
    **{"LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MR": 27, "MT": 31, "MU": 30, "NL": 18, "NO": 15},
    **{"PK": 24, "PL": 28, "PS": 29, "PT": 25, "QA": 29, "RO": 24, "RS": 22, "SA": 24, "SC": 31, "SE": 24, "SI": 19},
    **{"SK": 24, "SM": 27, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20},
}


def is_iban(text: str, start: int, end: int) -> bool:
    """By its checksum and the structure of its country's (the registry of ISO 13616)."""
    return bool(_stdnum("iban").is_valid(text[start:end], check_country=False))


def digits_of(text: str) -> str:
    return "".join(c for c in text if c.isdigit())


def _stdnum(name: str) -> Any:
    """Imported when a number is met: with it comes `ssl`, which each worker would import at its start."""
    return importlib.import_module(f"stdnum.{name}")


def checked_by(*names: str) -> Sum:
    """Whether one of these modules of python-stdnum says that a number is valid."""

    def check(text: str) -> bool:
        return any(_stdnum(name).is_valid(text) for name in names)

    return check


def is_rrn(text: str) -> bool:
    """Korea: a date, a dash, the century and sex. Numbers since 2020 have no checksum any more."""
    digits = digits_of(text)
    try:
        datetime.date(2000, int(digits[2:4]), int(digits[4:6]))
    except ValueError:
        return False
    return True


# name, title, pattern, check. Shape and checksum suffice.
FREE: tuple[tuple[str, str, str, Sum | None], ...] = (
    ("ssn", "US social security number", r"(?!000|666|9\d\d)\d{3}-(?!00)\d\d-(?!0000)\d{4}", None),
    ("cpf", "CPF", r"\d{3}\.\d{3}\.\d{3}-\d\d", checked_by("br.cpf")),
    ("cnpj", "CNPJ", r"\d\d\.\d{3}\.\d{3}/\d{4}-\d\d", checked_by("br.cnpj")),
    (
        "dni",
        "DNI",
        r"(?:\d{8}|\d\d\.\d{3}\.\d{3}|[XYZxyz]-?\d{7})-?[A-HJ-NP-TV-Za-hj-np-tv-z]",
        checked_by("es.dni", "es.nie"),
    ),
    (
        "nir",
        "French social security number",
        r"[12] ?\d\d ?(?:0[1-9]|1[0-2]|[2-9]\d) ?\d[\dAB] ?\d{3} ?\d{3} ?\d\d",
        checked_by("fr.nir"),
    ),
    ("ahv", "AHV number", r"756[. ]?\d{4}[. ]?\d{4}[. ]?\d\d", checked_by("ch.ssn")),
    ("cn-id", "Chinese identity number", r"[1-8]\d{5}(?:19|20)\d\d[01]\d[0-3]\d{4}[\dXx]", checked_by("cn.ric")),
    ("personnummer", "personnummer", r"(?:19|20)?\d{6}[-+]\d{4}", checked_by("se.personnummer")),
    ("hetu", "henkilötunnus", r"\d{6}[-+A-FU-Ya-fu-y]\d{3}[0-9A-FHJ-NPR-Ya-fhj-npr-y]", checked_by("fi.hetu")),
    ("rrn", "Korean resident number", r"\d{2}[01]\d[0-3]\d-[1-8]\d{6}", is_rrn),
    ("be-nrn", "Belgian national number", r"\d\d\.\d\d\.\d\d-\d{3}[.-]\d\d", checked_by("be.nn")),
    ("cuit", "CUIT", r"(?:20|23|24|25|26|27|30|33|34)-\d{8}-\d", checked_by("ar.cuit")),
    ("rut", "RUT", r"\d{1,2}\.\d{3}\.\d{3}-[\dkK]", checked_by("cl.rut")),
    ("curp", "CURP", r"[A-Z]{4}\d{6}[HMX][A-Z]{5}[A-Z\d]\d", checked_by("mx.curp")),
    (
        "codice-fiscale",
        "codice fiscale",
        r"[A-Za-z]{6}\d\d[A-EHLMPRSTa-ehlmprst]\d\d[A-Za-z]\d{3}[A-Za-z]",
        checked_by("it.codicefiscale"),
    ),
    ("fodselsnummer", "fødselsnummer", r"[0-7]\d[0-9]\d\d\d ?\d{5}", checked_by("no.fodselsnummer")),
    ("mrz", "machine-readable zone of a passport", r"P[A-Z<][A-Z]{3}[A-Z<]{39}\s{1,2}[A-Z0-9<]{44}", None),
)

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
BORN = (
    "dob|d.o.b|date of birth|date_of_birth|dateofbirth|birth date|birthdate|birthday|born|"
    "geboren|geburtsdatum|geb.|né|née|"
    "date de naissance|nacido|nacida|nacimiento|nascido|nascida|nascimento|nato il|nata il|nato a|data di nascita|"
    "geboortedatum|urodzony|urodzona|urodzenia|född|født|fødselsdato|syntynyt|生年月日|出生|생년월일|doğum|"
    "дата рождения|родился|родилась"
)


UNSPACED = "\u2e80"  # scripts behind it (Chinese, Japanese, Korean) put no space between a word and a number
NO_WORD_BEFORE, NO_WORD_BEHIND = r"(?<![^\W\u2e80-\uffff]|\.)", r"(?![^\W\u2e80-\uffff])"


def begins(text: str, start: int) -> bool:
    """Not in the middle of a longer number, word, version or table. (A look behind in the pattern would be tried at
    every character; here it costs nothing where the pattern does not match.)
    """
    before = text[start - 1 : start]
    if (before.isalnum() and before < UNSPACED) or (before in ("_", ".", "+", "-") and before):
        return False
    return not (before in (" ", ",") and text[start - 2 : start - 1].isdigit())


def _checked(check: Sum | None) -> Check:
    if check is None:
        return lambda text, start, end: begins(text, start)
    return lambda text, start, end: begins(text, start) and check(text[start:end])


def _upper(name: str) -> str:
    return f"[{name.upper()}]"


def _free(name: str, title: str, pattern: str, check: Sum | None) -> Rule:
    compiled = re.compile(rf"(?:{pattern})(?![\w-]|[.,]\d)", re.ASCII)
    return Rule(name, title, _upper(name), compiled, gate="number", holds=_checked(check))


def _has_digits(text: str, start: int, end: int) -> bool:
    """At least two digits: "passport number required" names none."""
    return sum(c.isdigit() for c in text[start:end]) >= 2


def _is_upper(text: str, start: int, end: int) -> bool:
    return text[start:end].isupper()


def read_named_rules(path: Path) -> tuple[Rule, ...]:
    """Numbers behind a word that names them (numbers.toml says which keys)."""
    return tuple(
        named_rule(
            rule["id"],
            rule["description"],
            _upper(rule["id"]),
            "|".join(rule["keywords"]),
            rf"{NO_WORD_BEFORE}({rule['regex']}){NO_WORD_BEHIND}(?!-|[.,]\d)",
            _has_digits,
        )
        for rule in tomllib.loads(path.read_text(encoding="utf-8"))["rules"]
    )


def named_rule(name: str, title: str, placeholder: str, words: str, pattern: str, holds: Check | None) -> Rule:
    """One of `words` (with | between, in lower case), at most 28 characters that are no digit, and the pattern."""
    # A digit must be near at all: most words that could name a number name none.
    behind = re.compile(rf"(?=[^\d\n]{{0,34}}+\d)[^\d\n]{{0,28}}?{pattern}")
    return Rule(name, title, placeholder, behind, tuple(words.split("|")), "digits", "behind-word", 1, True, holds)


CARD = r"(?:\d{4}(?:[ -]\d{4}){2}[ -]\d{1,7}|\d{4}[ -]\d{6}[ -]\d{4,5}|\d{13,19})(?![\w-]|[ ]\d{4}|\.\d)"
IBAN = r"[a-z](?<![a-z\d][a-z])[a-z]\d\d(?:{})(?![a-z\d])".format(
    "|".join(rf"(?<={country}\d\d)(?:[ -]?[a-z\d]){{{length - 4}}}" for country, length in IBAN_LENGTHS.items())
)
NUMBER_RULES: tuple[Rule, ...] = (
    Rule("iban", "IBAN", "[IBAN]", re.compile(IBAN, re.ASCII | re.IGNORECASE), gate="number", holds=is_iban),
    Rule("card", "card number", "[CARD]", re.compile(CARD, re.ASCII), gate="number", holds=is_card),
    *(_free(*one) for one in FREE),
    *read_named_rules(Path(__file__).with_name("numbers.toml")),
    named_rule(
        "number-plate",
        "number plate",
        "[NUMBER-PLATE]",
        "car|vehicle|registration|reg|van|parked|plate",
        rf"{NO_WORD_BEFORE}([a-z]{{2}}\d\d ?[a-z]{{3}}){NO_WORD_BEHIND}",
        _is_upper,
    ),
    Rule(
        "birth-date",
        "date of birth",
        "[DATE_OF_BIRTH]",
        re.compile(r"\*\s?(\d{1,2}\.\d{1,2}\.(?:19|20)\d\d)(?!\d)"),
        ("*",),
        "number",
        "at-marker",
        1,
    ),
    named_rule("birth-date", "date of birth", "[DATE_OF_BIRTH]", BORN, rf"(?<![\w.])({DATE})(?!\d)", None),
)
