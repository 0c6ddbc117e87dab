"""Checks of the text after a word such as `password=`: a generated value, a chosen one, or a placeholder."""

import math
import re
from itertools import pairwise


def word_list(text: str) -> tuple[str, ...]:
    """Return the words of `text`."""
    return tuple(text.split())


# A text that begins so is a placeholder, whatever follows.
PLACEHOLDER_STARTS = word_list("your my_ my- my. example xxx *** ... ••• changeme change_me change-me < { [ #{ ./ ~/")
# A text that begins so is a placeholder if only words follow: env.PASSWORD, $DB_PASSWORD, getPassword.
SOURCE_STARTS = word_list(
    "none null true false undefined os. env process. self. config settings secrets. vault get fake dummy sample "
    "test- test_ $ % ( / @ & *"
)
PLACEHOLDER_PARTS = word_list(
    "example placeholder redacted changeme your_ your- xxxx **** .... _here -here ${ {{ }} $( ]( not-a-real "
    "insert_ replace_ [secret: 0000000000 ==="
)
# Words that stand behind "password:" in forms, schemas, messages and settings.
PLACEHOLDER_WORDS = word_list(
    "password passwd pass passwort pwd secret token string text str user username user:pass pass123 required "
    "optional sha1 sha256 sha512 sha-256 md5 base64 utf8 utf-8 bcrypt argon2 argon2id scrypt pbkdf2 oauth2 basic "
    "http2 ldap3 field1 step1 step2 value1 admin root guest postgres localhost"
)
# Measured on identifiers of the standard library: 99 % lie below 3.2 bits. 20 random characters of base 62 have 3.9.
ENTROPY_BITS = 3.3
HEX = re.compile(r"[0-9a-fA-F]{32,128}")
DIGIT, LETTER = re.compile(r"\d"), re.compile(r"[A-Za-z]")
CODE_SIGNS = re.compile(r"[(){}<>\[\];\\]|\w\.\w{3,20}\.\w")
_WORDS = re.compile(
    r"(?:\d{0,4}[A-Z]{0,2}[a-z]{3,20}[\d_.-]{0,4}){2,12}(?:[A-Z]?[a-z]{0,2}\d?)|[A-Z]{2,20}(?:_[A-Z\d]{1,20}){1,8}"
)  # an identifier made of words
MIN_LETTERS_ALONE = 16  # "the password is correcthorsebattery": no sentence goes on with such a word
MAX_LOOKED_AT = 200  # characters of a value whose entropy is counted


def entropy_bits(text: str) -> float:
    """Return the Shannon entropy in bits per character."""
    counts = [text.count(c) for c in set(text)]
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def has_digit_and_letter(value: str) -> bool:
    """Return whether a value has both a digit and a Latin letter."""
    return DIGIT.search(value) is not None and LETTER.search(value) is not None


def is_placeholder(value: str) -> bool:
    """Return whether a text replaces a value: your_key_here, ${TOKEN}, xxxx, or code that reads one."""
    lower = value.lower()
    if lower.startswith(PLACEHOLDER_STARTS) or lower.strip(".,!?:") in PLACEHOLDER_WORDS:
        return True
    if lower.startswith(SOURCE_STARTS) and (is_wordy(value) or "/" in value.strip("/")):
        return True
    return any(part in lower for part in PLACEHOLDER_PARTS) or len(set(lower)) <= 3


def is_wordy(value: str) -> bool:
    """Return whether a value is words separated by signs, each with at most two digits at its end."""
    parts = re.split(r"[\W_]+", value)
    return all(re.fullmatch(r"[^\W\d_]*\d{0,2}", part) and not _is_scrambled(part) for part in parts)


def has_code_signs(value: str) -> bool:
    """Return whether a value looks like code: brackets or attribute access. A password may begin with "("."""
    return CODE_SIGNS.search(value.removeprefix("(") if ")" not in value else value) is not None


def looks_random(value: str) -> bool:
    """Return whether a value seems generated: letters and digits of high entropy, no identifier or placeholder."""
    if not has_digit_and_letter(value) or is_placeholder(value) or has_code_signs(value):
        return False
    if _WORDS.fullmatch(value):
        return False
    return entropy_bits(value[:MAX_LOOKED_AT]) >= ENTROPY_BITS


VOWEL = re.compile("[aeiouyAEIOUY]")
CAPITAL = re.compile("(?<=[a-z])(?=[A-Z])")


def _is_scrambled(value: str) -> bool:
    """Return whether many capitals occur inside words, as in random text."""
    steps = sum(a.islower() and b.isupper() for a, b in pairwise(value))
    if steps < 3:
        return False
    without_vowel = sum(VOWEL.search(part) is None for part in CAPITAL.split(value))
    return len(value) / steps < 3.5 or without_vowel >= 3


def looks_chosen(value: str) -> bool:
    """Return whether a person may have chosen a value as password: letters and digits, six digits, or signs."""
    if is_placeholder(value) or has_code_signs(value):
        return False
    digits, letters = sum(c.isdigit() for c in value), sum(c.isalpha() for c in value)
    signs = len(value) - digits - letters
    if letters == 0:
        return digits >= 6 and signs <= 2
    if digits == signs == 0:
        return _is_scrambled(value)
    return digits > 0 or (signs > 0 and any(c in "!@#$%^&*+=?" for c in value) and any(c.isupper() for c in value))
