"""Checksums and dates inside national identity numbers, each from its authority's description."""

import datetime
from collections.abc import Sequence


def digits_of(text: str) -> str:
    return "".join(c for c in text if c.isdigit())


def weighted(digits: str, weights: Sequence[int], modulus: int) -> int:
    """Sum of digit times weight, modulo `modulus`; the shape of most national checksums."""
    return sum(int(d) * w for d, w in zip(digits, weights, strict=False)) % modulus


def luhn(digits: str) -> bool:
    """The checksum of card numbers (ISO/IEC 7812-1)."""
    total = 0
    for i, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + i % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def is_date(year: int, month: int, day: int) -> bool:
    try:
        datetime.date(year, month, day)
    except ValueError:
        return False
    return True


def is_cpf(text: str) -> bool:
    digits = digits_of(text)
    if len(set(digits)) == 1:
        return False
    return all(weighted(digits[:n], range(n + 1, 1, -1), 11) * 10 % 11 % 10 == int(digits[n]) for n in (9, 10))


def is_cnpj(text: str) -> bool:
    digits = digits_of(text)
    weights = (6, 5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2)
    return all(weighted(digits[:n], weights[13 - n :], 11) * 10 % 11 % 10 == int(digits[n]) for n in (12, 13))


def is_dni(text: str) -> bool:
    """Spain's DNI and NIE: the letter is the number modulo 23."""
    plain = text.upper().replace("-", "").replace(" ", "").replace(".", "")
    number = {"X": "0", "Y": "1", "Z": "2"}.get(plain[0], plain[0]) + plain[1:-1]
    return plain[-1] == "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23]


def is_nir(text: str) -> bool:
    """France's NIR; Corsica's 2A and 2B count as 19 and 18."""
    plain = text.upper().replace(" ", "").replace(".", "").replace("2A", "19").replace("2B", "18")
    return len(plain) == 15 and plain.isdigit() and 97 - int(plain[:13]) % 97 == int(plain[13:])


def is_ean13(text: str) -> bool:
    digits = digits_of(text)
    return (10 - weighted(digits[:12], (1, 3) * 6, 10)) % 10 == int(digits[12])


def is_chinese_id(text: str) -> bool:
    """GB 11643: a date and a check character by ISO 7064 MOD 11-2."""
    year, month, day = int(text[6:10]), int(text[10:12]), int(text[12:14])
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    return is_date(year, month, day) and "10X98765432"[weighted(text[:17], weights, 11)] == text[17].upper()


def is_personnummer(text: str) -> bool:
    digits = digits_of(text)[-10:]
    day = int(digits[4:6])
    return is_date(2000, int(digits[2:4]), day - 60 if day > 60 else day) and luhn(digits)


def is_hetu(text: str) -> bool:
    """Finland: the date and the number as one, modulo 31, name the last character."""
    plain = text.upper()
    dated = is_date(2000, int(plain[2:4]), int(plain[:2]))
    return dated and "0123456789ABCDEFHJKLMNPRSTUVWXY"[int(plain[:6] + plain[7:10]) % 31] == plain[10]


def is_fodselsnummer(text: str) -> bool:
    digits = digits_of(text)
    first = (11 - weighted(digits[:9], (3, 7, 6, 1, 8, 9, 4, 5, 2), 11)) % 11
    second = (11 - weighted(digits[:10], (5, 4, 3, 2, 7, 6, 5, 4, 3, 2), 11)) % 11
    day = int(digits[:2])
    return is_date(2000, int(digits[2:4]), day - 40 if day > 40 else day) and digits[9:] == f"{first}{second}"


def is_rrn(text: str) -> bool:
    """Korea: a date, a dash, the century and sex. Numbers since 2020 have no checksum any more."""
    digits = digits_of(text)
    return is_date(2000, int(digits[2:4]), int(digits[4:6]))


def is_belgian(text: str) -> bool:
    digits = digits_of(text)
    return any(97 - int(front + digits[:9]) % 97 == int(digits[9:]) for front in ("", "2"))


def is_cuit(text: str) -> bool:
    digits = digits_of(text)
    return (11 - weighted(digits[:10], (5, 4, 3, 2, 7, 6, 5, 4, 3, 2), 11)) % 11 == int(digits[10])


def is_rut(text: str) -> bool:
    plain = text.upper().replace(".", "").replace("-", "")
    return "0K987654321"[weighted(plain[-2::-1], (2, 3, 4, 5, 6, 7, 2, 3, 4), 11)] == plain[-1]


def is_curp(text: str) -> bool:
    alphabet = "0123456789ABCDEFGHIJKLMN\u00d1OPQRSTUVWXYZ"
    total = sum(alphabet.index(c) * (18 - i) for i, c in enumerate(text[:17].upper()))
    return is_date(2000, int(text[6:8]), int(text[8:10])) and -total % 10 == int(text[17])


def is_codice_fiscale(text: str) -> bool:
    """Italy: odd places by a table of their own, even ones by their order, modulo 26."""
    odd = dict(zip("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", ODD_VALUES, strict=True))
    plain = text.upper()
    total = sum(odd[c] if i % 2 == 0 else int(c, 36) - (0 if c.isdigit() else 10) for i, c in enumerate(plain[:15]))
    return chr(ord("A") + total % 26) == plain[15]


ODD_VALUES = (
    *(1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10),
    *(22, 25, 24, 23),
)
