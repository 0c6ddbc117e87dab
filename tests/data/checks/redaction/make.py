"""Writes the .jsonl files of this folder from its .txt files: `python make.py`.

Every value is drawn from a fixed seed, partly by Faker (pip install faker): nobody's data, nobody's secret. Half of
the lines of each label go to the sealed half, which was written before the rules and is not looked at while they are
changed. A BREAK stands inside every value, so that scanners of secrets don't take this corpus for a leak; `load`
in tests/data/checks/redaction_corpus.py takes it out again.
"""

import json
import random
import re
import string
import uuid
from collections.abc import Callable
from pathlib import Path

from faker import Faker

HERE = Path(__file__).parent
BREAK = "\u2016"
SEED = 11
UPPER, LOWER, DIGITS = string.ascii_uppercase, string.ascii_lowercase, string.digits
CLASSES = {
    "A": UPPER + LOWER + DIGITS,
    "B": UPPER + LOWER + DIGITS + "-_",
    "S": UPPER + LOWER + DIGITS + "+/",
    "U": UPPER + DIGITS,
    "L": LOWER + DIGITS,
    "l": LOWER + DIGITS,
    "H": DIGITS + "abcdef",
    "X": DIGITS + "ABCDEF",
    "D": DIGITS,
    "a": LOWER,
    "Z": UPPER,
    "2:": UPPER + "234567",
}
IDS = ("order", "id", "ref", "user_id", "item", "case", "message", "id:", "order no.", "customer", "article", "row")
FIELDS = ("id", "user_id", "order_id", "request_id", "event", "parent_id", "account_id", "guild", "seq", "offset")
rng = random.Random(SEED)


def digits(count: int) -> str:
    return "".join(rng.choice(DIGITS) for _ in range(count))


def with_luhn(payload: str) -> str:
    """`payload` and the digit that makes it pass ISO/IEC 7812-1."""
    doubled = sum(sum(divmod(int(c) * (2 - i % 2), 10)) for i, c in enumerate(reversed(payload)))
    return payload + str(-doubled % 10)


def weighted(payload: str, weights: str | list[int], modulus: int) -> int:
    return sum(int(c) * int(w) for c, w in zip(payload, weights, strict=True)) % modulus


def retry(make: Callable[[], str | None]) -> str:
    while (made := make()) is None:
        pass
    return made


def grouped(text: str, *sizes: int, by: str = " ") -> str:
    pieces, place = [], 0
    for size in sizes:
        pieces.append(text[place : place + size])
        place += size
    return by.join(pieces)


def verhoeff(payload: str) -> str:
    """Aadhaar's check digit (J. Verhoeff, 1969), from the tables of the dihedral group D5."""
    multiply = [
        [
            (a + b) % 5
            if a < 5 and b < 5
            else (a - b) % 5 + 5 * (b < 5)
            if a >= 5 and b < 5
            else (a + b - 5) % 5 + 5
            if a < 5
            else (a - b) % 5
            for b in range(10)
        ]
        for a in range(10)
    ]
    permute = [list(range(10)), [1, 5, 7, 6, 2, 8, 3, 0, 9, 4]]
    for _ in range(6):
        permute.append([permute[-1][permute[1][i]] for i in range(10)])
    check = 0
    for i, c in enumerate(reversed("".join([payload, "0"]))):
        check = multiply[check][permute[i % 8][int(c)]]
    return payload + str(next(d for d in range(10) if multiply[check][d] == 0))


def steuerid() -> str:
    """Ten digits of which one comes twice, then ISO 7064 MOD 11,10."""
    chosen = rng.sample(DIGITS, 9)
    first = retry(
        lambda: (p if p[0] != "0" else None) if (p := "".join(rng.sample([*chosen, chosen[0]], 10))) else None
    )
    product = 10
    for c in first:
        total = (int(c) + product) % 10 or 10
        product = 2 * total % 11
    return first + str((11 - product) % 10)


def dni(number: str) -> str:
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number.replace("X", "0").replace("Y", "1").replace("Z", "2")) % 23]


def nhs() -> str:
    def one() -> str | None:
        body = "9" + digits(8)
        check = 11 - weighted(body, [10, 9, 8, 7, 6, 5, 4, 3, 2], 11)
        return None if check == 10 else body + str(check % 11)

    return retry(one)


def nir() -> str:
    body = f"2{digits(2)}0{rng.randint(1, 9)}75{digits(6)}"
    return body + f"{97 - int(body) % 97:02}"


def cuit() -> str:
    def one() -> str | None:
        body = "20" + digits(8)
        check = (11 - weighted(body, "5432765432", 11)) % 11
        return None if check == 10 else f"{body[:2]}-{body[2:]}-{check}"

    return retry(one)


def rut() -> str:
    body = "1" + digits(7)
    check = "0K987654321"[weighted(body[::-1], "23456723", 11)]
    return f"{body[:2]}.{body[2:5]}.{body[5:]}-{check}"


def cn_born() -> str:
    return f"19{rng.randint(50, 99)}0{rng.randint(1, 9)}{rng.randint(10, 28)}"


def yymmdd() -> str:
    return f"{rng.randint(50, 99)}0{rng.randint(1, 9)}{rng.randint(10, 28)}"


def mynumber() -> str:
    body = digits(11)
    rest = weighted(body[::-1], [2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6], 11)
    return body + str(0 if rest <= 1 else 11 - rest)


def tfn() -> str:
    return retry(lambda: t if weighted(t := digits(9), [1, 4, 3, 7, 5, 8, 6, 9, 10], 11) == 0 and t[0] != "0" else None)


def medicare() -> str:
    body = "2" + digits(7)
    return grouped(body + str(weighted(body, "13791379", 10)) + "1", 4, 5, 1)


def benrn() -> str:
    body = yymmdd() + digits(3)
    full = body + f"{97 - int(body) % 97:02}"
    return f"{full[:2]}.{full[2:4]}.{full[4:6]}-{full[6:9]}.{full[9:]}"


def ptnif() -> str:
    body = "2" + digits(7)
    rest = weighted(body, "98765432", 11)
    return body + str(0 if rest < 2 else 11 - rest)


def curp() -> str:
    body = f"GODE{yymmdd()}{rng.choice('HM')}DFRRN0"
    alphabet = "0123456789ABCDEFGHIJKLMN\u00d1OPQRSTUVWXYZ"
    total = sum(alphabet.index(c) * (18 - i) for i, c in enumerate(body))
    return body + str(-total % 10)


def czrc() -> str:
    def one() -> str | None:
        body = yymmdd() + digits(3)
        check = int(body) % 11
        return None if check == 10 else f"{body[:6]}/{body[6:]}{check}"

    return retry(one)


def rvnr() -> str:
    body = f"65{rng.randint(10, 28)}0{rng.randint(1, 9)}{rng.randint(50, 99)}J{digits(2)}"
    flat = body.replace("J", "10")
    total = sum(sum(divmod(int(c) * w, 10)) for c, w in zip(flat, [2, 1, 2, 5, 7, 1, 2, 1, 2, 1, 2, 1], strict=True))
    return f"{body}{total % 10}"


CARDS = {"visa": ("4", 16), "master": ("53", 16), "amex": ("37", 15), "discover": ("6011", 16), "diners": ("36", 14)}
CARDS |= {"jcb": ("3530", 16), "unionpay": ("6221", 19)}


def card(name: str) -> str:
    prefix, length = CARDS[name]
    return with_luhn(prefix + digits(length - 1 - len(prefix)))


MADE: dict[str, Callable[[], str]] = {
    "uuid": lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    "o": lambda: str(rng.randint(33, 254)),
    "d": lambda: rng.choice("123456789"),
    "id": lambda: rng.choice(IDS),
    "field": lambda: rng.choice(FIELDS),
    "visa4": lambda: grouped(card("visa"), 4, 4, 4, 4),
    "master4": lambda: grouped(card("master"), 4, 4, 4, 4),
    "master-": lambda: grouped(card("master"), 4, 4, 4, 4, by="-"),
    "amex4": lambda: grouped(card("amex"), 4, 6, 5),
    "discover4": lambda: grouped(card("discover"), 4, 4, 4, 4),
    "jcb4": lambda: grouped(card("jcb"), 4, 4, 4, 4),
    **{name: lambda name=name: card(name) for name in CARDS},  # type: ignore[misc]
    "ssnplain": lambda: f"{rng.randint(100, 665)}{rng.randint(10, 99)}{rng.randint(1000, 9999)}",
    "nhs": nhs,
    "nhs3": lambda: grouped(nhs(), 3, 3, 4),
    "nhsgap": lambda: "",
    "steuerid": steuerid,
    "steuerid3": lambda: grouped(steuerid(), 2, 3, 3, 3),
    "rvnr": rvnr,
    "nir": lambda: grouped(nir(), 1, 2, 2, 2, 3, 3, 2),
    "nir1": nir,
    "dni": lambda: (n := digits(8)) + dni(n),
    "dni-": lambda: f"{(n := digits(8))}-{dni(n)}",
    "nie": lambda: (n := "X" + digits(7)) + dni(n),
    "benrn": benrn,
    "ptnif": ptnif,
    "dkcpr": lambda: f"{rng.randint(10, 28)}0{rng.randint(1, 9)}{rng.randint(50, 99)}-{digits(4)}",
    "aadhaar": lambda: verhoeff(rng.choice("23456789") + digits(10)),
    "aadhaar4": lambda: grouped(verhoeff(rng.choice("23456789") + digits(10)), 4, 4, 4),
    "mynumber": mynumber,
    "zaid": lambda: with_luhn(yymmdd() + digits(4) + "08"),
    "tfn": lambda: grouped(tfn(), 3, 3, 3),
    "medicare": medicare,
    "curp": curp,
    "cuit": cuit,
    "rut": rut,
    "czrc": czrc,
    "ppsend": lambda: "",
}
CODE = re.compile(r"<(?:(2:|[A-Za-z])(\d+)|([a-z]{2}_[A-Z]{2})\.(\w+)|([a-z\d-]+))>")
FAKERS: dict[str, Faker] = {}


def pps(text: str) -> str:
    """Ireland's check letter behind the seven digits at the end of `text`."""
    number = re.findall(r"\d{7}", text)[-1]
    return "WABCDEFGHIJKLMNOPQRSTUV"[weighted(number, "8765432", 23)]


def filled(line: str) -> str:
    def fill(match: re.Match[str]) -> str:
        kind, count, locale, method, name = match.groups()
        if locale:
            return faked(locale, method)
        if name:
            return MADE[name]() if name in MADE else match.group()
        if kind == "h":
            return rng.choice("123456789abcdef") + "".join(rng.choice(CLASSES["H"]) for _ in range(int(count) - 1))
        return "".join(rng.choice(CLASSES[kind]) for _ in range(int(count))) if kind in CLASSES else match.group()

    ends_with_letter = "<ppsend>" in line
    text = CODE.sub(fill, line).replace("\\n", "\n").replace("\\\\", "\\")
    return text.replace("]]", pps(text) + "]]") if ends_with_letter else text


def faked(locale: str, method: str) -> str:
    if locale not in FAKERS:
        FAKERS[locale] = Faker(locale)
        FAKERS[locale].seed_instance(SEED)
    fake = FAKERS[locale]
    if not method.startswith("iban"):
        return str(getattr(fake, method)())
    iban = fake.iban()
    if method == "iban4":
        return " ".join(iban[i : i + 4] for i in range(0, len(iban), 4))
    return iban.lower() if method == "ibanlow" else iban


def lines(kind: str) -> list[tuple[str, str]]:
    """(label, filled line) of one file."""
    found = []
    for line in (HERE / f"{kind}.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            label, _, text = line.partition(" | ")
            name, _, times = label.partition(" *")
            found += [(name, filled(text)) for _ in range(int(times or 1))]
    return found


def entry(kind: str, label: str, text: str) -> dict[str, object]:
    """One line of the corpus: `values` is what must be gone; each has a BREAK after its second character."""
    values = re.findall(r"\[\[(.*?)\]\]", text, flags=re.S)
    broken = re.sub(r"\[\[(..)(.*?)\]\]", rf"\1{BREAK}\2", text, flags=re.S)
    if kind == "clean":
        return {"kind": kind, "label": label, "text": text}
    assert values, text
    return {"kind": kind, "label": label, "text": broken, "values": [v[:2] + BREAK + v[2:] for v in values]}


def written_later(name: str, seed: int) -> None:
    """published.jsonl: formats that others publish, in lines of our own, written when the rules were done; third.jsonl:
    what people paste into chats and logs, written after the rules were mended for it.
    """
    rng.seed(seed)
    found = []
    for line in (HERE / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            kind, label, text = line.split(" | ", 2)
            found.append(entry(kind, label, filled(text)))
    _write(name, found)


def _write(name: str, entries: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in entries)
    (HERE / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    halves: dict[str, list[dict[str, object]]] = {"development": [], "sealed": []}
    for kind in ("secrets", "personal", "clean"):
        labels: dict[str, list[dict[str, object]]] = {}
        for label, text in lines(kind):
            labels.setdefault(label, []).append(entry(kind.removesuffix("s"), label, text))
        turn = 0  # goes on from label to label, so that single lines are divided too
        for label in rng.sample(sorted(labels), len(labels)):
            for one in rng.sample(labels[label], len(labels[label])):
                halves["development" if turn % 2 == 0 else "sealed"].append(one)
                turn += 1
    for name, entries in halves.items():
        entries.sort(key=lambda one: (str(one["kind"]), str(one["label"])))
        _write(name, entries)
    written_later("published", SEED + 1)
    written_later("third", SEED + 2)


if __name__ == "__main__":
    main()
