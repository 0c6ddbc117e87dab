"""Finds secrets and personal data in text and replaces them: anchored rules, keyed entropy, checksummed numbers.

No rule fires on a high-entropy word alone: on prose such rules raise an alarm in every other line. A secret has a
prefix that its maker gave it (AKIA, ghp_, ...), or stands behind a word such as `password=`. A number is personal when
its checksum holds and it has the shape that people write it in. Each rule first looks for a cheap marker, so that rows
without one cost about 2 microseconds.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hivetune.data.reasons import RowRefused
from hivetune.records import Message

Policy = Literal["redact", "reject", "keep"]


@dataclass(frozen=True, slots=True)
class Rule:
    """`markers`: without one of them the pattern can't match; "~word" ignores case, "#" asks for digits.

    `group`: the part of the match to replace. `holds`: a check of that part, such as a checksum.
    """

    name: str
    markers: tuple[str, ...]
    pattern: re.Pattern[str]
    placeholder: str
    group: int = 0
    holds: Callable[[str], bool] | None = None


class RuleSet:
    """Rules with their markers laid out for one pass. Earlier rules win where two match."""

    def __init__(self, rules: Sequence[Rule]):
        self.rules = tuple(rules)
        marked = [(marker, i) for i, rule in enumerate(rules) for marker in rule.markers]
        self._exact = [(marker, i) for marker, i in marked if marker[0] not in "~#"]
        self._folded = [(marker[1:], i) for marker, i in marked if marker[0] == "~"]
        self._numbers = [i for marker, i in marked if marker == "#"]

    def find(self, text: str) -> list[tuple[int, int, Rule]]:
        """(start, end, rule) of all that matches and holds: in order, none overlapping."""
        lower = text.lower()
        wanted = [i for marker, i in self._exact if marker in text]
        wanted += [i for marker, i in self._folded if marker in lower]
        if self._numbers and _NUMBER.search(text):
            wanted += self._numbers
        found: list[tuple[int, int, Rule]] = []
        for i in sorted(set(wanted)) if wanted else ():
            rule = self.rules[i]
            for match in rule.pattern.finditer(text):
                start, end = match.span(rule.group)
                holds = rule.holds is None or rule.holds(match.group(rule.group))
                if holds and all(end <= a or start >= b for a, b, _ in found):
                    found.append((start, end, rule))
        return sorted(found, key=lambda item: item[0])


def _rule(name: str, markers: str, pattern: str, *, group: int = 0, holds: Callable[[str], bool] | None = None) -> Rule:
    return Rule(name, tuple(markers.split()), re.compile(pattern), f"[SECRET:{name}]", group, holds)


def entropy_bits(text: str) -> float:
    """Shannon entropy in bits a character."""
    counts = [text.count(c) for c in set(text)]
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def _looks_random(value: str) -> bool:
    """A generated value: mixed letters and digits of high entropy; not a word, path, variable or placeholder."""
    if value.lower().startswith(PLACEHOLDERS) or any(c in value for c in "<>{}$()[]*"):
        return False
    has_digit, has_letter = any(c.isdigit() for c in value), any(c.isalpha() for c in value)
    return has_digit and has_letter and entropy_bits(value) >= ENTROPY_BITS


def _looks_chosen(value: str) -> bool:
    """A password a person chose: at least two of digits, capitals, signs; not a placeholder or a call."""
    if value.lower().startswith(PLACEHOLDERS) or any(c in value for c in "<>{}()[]"):
        return False
    kinds = (str.isdigit, str.isupper, lambda c: c in "!@#$%^&*-_+=?")
    return sum(1 for kind in kinds if any(kind(c) for c in value)) >= 2 and any(c.isdigit() for c in value)


PLACEHOLDERS = (
    "your",
    "my_",
    "my-",
    "example",
    "xxx",
    "***",
    "changeme",
    "none",
    "null",
    "true",
    "false",
    "os.",
    "env",
)
# Measured on identifiers and words of the standard library's sources: 99 % lie below 3.2 bits; 20 random characters of
# base 62 have 3.9 on average.
ENTROPY_BITS = 3.3
KEYED = r"(?i)\b(?:[\w.-]*(?:api[_-]?key|secret|token|access[_-]?key|auth[_-]?key|private[_-]?key)[\w.-]*)"
ASSIGNED = r"[\"']?\s*(?::=|=>|=|:)\s*[\"']?"

SECRET_RULES: tuple[Rule, ...] = (
    _rule(
        "private-key",
        "-----BEGIN",
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z ]*-----|\Z)",
    ),
    _rule("aws-key-id", "AKIA ASIA", r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b"),
    _rule(
        "github", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{60,255})\b"
    ),
    _rule("gitlab", "glpat- glrt-", r"\b(?:glpat|glrt)-[\w-]{20,64}"),
    _rule("slack", "xoxb- xoxp- xoxa- xoxr- xoxs- xapp-", r"\b(?:xox[bpars]|xapp)-[A-Za-z0-9-]{10,250}"),
    _rule("slack-webhook", "hooks.slack.com", r"https://hooks\.slack\.com/services/[\w/]{20,}"),
    _rule("openai", "sk-", r"\bsk-(?:proj-|svcacct-|admin-)?[A-Za-z0-9_-]{32,}"),
    _rule("anthropic", "sk-ant-", r"\bsk-ant-[\w-]{20,}"),
    _rule("google", "AIza", r"\bAIza[\w-]{35}"),
    _rule("google-oauth", "ya29. GOCSPX-", r"\b(?:ya29\.[\w-]{20,}|GOCSPX-[\w-]{28})"),
    _rule("huggingface", "hf_", r"\bhf_[A-Za-z]{34,}\b"),
    _rule("stripe", "sk_live_ rk_live_ sk_test_ rk_test_", r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"),
    _rule("twilio", "SK", r"\bSK[0-9a-f]{32}\b"),
    _rule("sendgrid", "SG.", r"\bSG\.[\w-]{22}\.[\w-]{43}"),
    _rule("mailgun", "key-", r"\bkey-[0-9a-f]{32}\b"),
    _rule("npm", "npm_", r"\bnpm_[A-Za-z0-9]{36}\b"),
    _rule("pypi", "pypi-", r"\bpypi-AgE[\w-]{50,}"),
    _rule("digitalocean", "dop_v1_ doo_v1_", r"\bdo[opr]_v1_[0-9a-f]{64}\b"),
    _rule("telegram", ":AA", r"\b\d{8,10}:AA[\w-]{33}\b"),
    _rule("discord-webhook", "discord", r"https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/\d+/[\w-]{40,}"),
    _rule("shopify", "shpat_ shpss_ shpca_", r"\bshp(?:at|ss|ca)_[0-9a-fA-F]{32}\b"),
    _rule("databricks", "dapi", r"\bdapi[0-9a-f]{32}\b"),
    _rule("azure-storage", "~accountkey=", r"(?i)AccountKey=([A-Za-z0-9+/]{86}==)", group=1),
    _rule("vault", "hvs. hvb.", r"\bhv[sb]\.[\w-]{24,}"),
    _rule("age", "AGE-SECRET-KEY-1", r"AGE-SECRET-KEY-1[A-Z0-9]{58}"),
    _rule("jwt", "eyJ", r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
    _rule("url-password", "://", r"\b[a-z][a-z0-9+.-]{1,20}://[^\s:/@]{1,60}:([^\s:/@]{3,100})@", group=1),
    _rule(
        "bearer", "~bearer ~basic", r"(?i)\b(?:bearer|basic)\s+([A-Za-z0-9+/_.=-]{20,})", group=1, holds=_looks_random
    ),
    _rule("keyed", "~key ~secret ~token", KEYED + ASSIGNED + r"([^\s\"',;]{12,200})", group=1, holds=_looks_random),
    _rule(
        "password",
        "~passw ~pwd ~passphrase",
        r"(?i)\b[\w.-]*(?:password|passwd|pwd|passphrase)" + ASSIGNED + r"([^\s\"',;]{6,100})",
        group=1,
        holds=_looks_chosen,
    ),
)


def luhn(digits: str) -> bool:
    """The checksum of card numbers (ISO/IEC 7812-1)."""
    total = 0
    for i, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + i % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def _card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return 13 <= len(digits) <= 19 and digits[0] in "3456" and len(set(digits)) > 1 and luhn(digits)


def _iban(text: str) -> bool:
    """ISO 13616: moved four to the end and read as a number, the rest by 97 is 1."""
    plain = re.sub(r"\s", "", text).upper()
    if not 15 <= len(plain) <= 34:
        return False
    return int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1


def _cpf(text: str) -> bool:
    digits = [int(c) for c in text if c.isdigit()]
    if len(set(digits)) == 1:
        return False
    for n in (9, 10):
        rest = sum(d * w for d, w in zip(digits[:n], range(n + 1, 1, -1), strict=True)) * 10 % 11 % 10
        if rest != digits[n]:
            return False
    return True


def _nhs(text: str) -> bool:
    digits = [int(c) for c in text if c.isdigit()]
    return (11 - sum(d * w for d, w in zip(digits[:9], range(10, 1, -1), strict=True)) % 11) % 11 == digits[9]


def _dni(text: str) -> bool:
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(text[:8]) % 23] == text[-1].upper()


def _nir(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return len(digits) == 15 and 97 - int(digits[:13]) % 97 == int(digits[13:])


def _phone(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return 8 <= len(digits) <= 15 and len(set(digits)) > 2


def _email(text: str) -> bool:
    """Not the addresses that documentation uses (RFC 2606), nor file@2x.png."""
    domain = text.rpartition("@")[2].lower()
    return not domain.endswith((".png", ".jpg", ".svg", ".example", ".test", ".invalid")) and domain not in (
        "example.com",
        "example.org",
        "example.net",
    )


def _personal(name: str, markers: str, pattern: str, holds: Callable[[str], bool] | None, placeholder: str) -> Rule:
    return Rule(name, tuple(markers.split()), re.compile(pattern), placeholder, 0, holds)


# Looked for once a text, so that the patterns for numbers run on few.
_NUMBER = re.compile(r"\d[\d .()-]{6,}\w|\d{8}")
# In groups of four, as American Express does, or in one piece; never digits one by one, which are mostly tables.
CARD = r"(?<![\d.-])(?:\d{4}(?:[ -]\d{4}){2}[ -]\d{1,7}|\d{4}[ -]\d{6}[ -]\d{4,5}|\d{13,19})(?![\d-]|\.\d)"
PERSONAL_RULES: tuple[Rule, ...] = (
    _personal("email", "@", r"\b[\w.%+-]{1,64}@(?:[\w-]{1,63}\.)+[A-Za-z]{2,24}\b", _email, "[EMAIL]"),
    _personal("iban", "#", r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b", _iban, "[IBAN]"),
    _personal("card", "#", CARD, _card, "[CARD]"),
    _personal("us-ssn", "#", r"(?<![\d-])(?!000|666|9\d\d)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\d-])", None, "[SSN]"),
    _personal("br-cpf", "#", r"(?<!\d)\d{3}\.\d{3}\.\d{3}-\d\d(?!\d)", _cpf, "[CPF]"),
    _personal("uk-nhs", "#", r"(?<!\d)(?<!\d[ -])\d{3} \d{3} \d{4}(?![ -]?\d)", _nhs, "[NHS]"),
    _personal("es-dni", "#", r"\b\d{8}-?[A-HJ-NP-TV-Z]\b", _dni, "[DNI]"),
    _personal("fr-nir", "#", r"(?<!\d)[12] ?\d\d ?(?:0[1-9]|1[0-2]) ?\d\d ?\d{3} ?\d{3} ?\d\d(?!\d)", _nir, "[NIR]"),
    _personal(
        "phone", "+", r"(?<![\w+])\+[1-9]\d{0,2}[ .()/-]{0,2}\d(?:[ .()/-]{0,2}\d){6,12}(?!\d)", _phone, "[PHONE]"
    ),
)


def redact_text(text: str, rules: RuleSet) -> str:
    """`text` with a placeholder for each find."""
    pieces, position = [], 0
    for start, end, rule in rules.find(text):
        pieces += [text[position:start], rule.placeholder]
        position = end
    return "".join([*pieces, text[position:]]) if pieces else text


def apply_policy(messages: tuple[Message, ...], rules: RuleSet, policy: Policy, reason: str) -> tuple[Message, ...]:
    """The messages after `policy`; the very same tuple when there was nothing to do.

    Raises RowRefused(reason) naming the rule under "reject". Tool calls' arguments are covered too.
    """
    if policy == "keep":
        return messages
    changed: list[Message] | None = None
    for i, message in enumerate(messages):
        found = rules.find(message.content) + rules.find(message.reasoning or "")
        calls = _redact_calls(message, rules)
        if not found and calls is message.tool_calls:
            continue
        if policy == "reject":
            names = ", ".join(sorted({rule.name for _, _, rule in found})) or "in a tool call"
            raise RowRefused(reason, f"{names}: remove it" + (" and revoke it" if reason == "secret" else ""))
        changed = changed or list(messages)
        thought = message.reasoning and redact_text(message.reasoning, rules)
        content = redact_text(message.content, rules)
        changed[i] = replace(message, content=content, tool_calls=calls, reasoning=thought)
    return tuple(changed) if changed is not None else messages


def redact_value(value: object, rules: RuleSet) -> object:
    """Every text inside a JSON value, redacted; the same object when nothing was found."""
    if isinstance(value, str):
        return redact_text(value, rules)
    if isinstance(value, dict):
        items = {key: redact_value(item, rules) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in value) else items
    if isinstance(value, list | tuple):
        cleaned = [redact_value(item, rules) for item in value]
        return value if all(a is b for a, b in zip(cleaned, value, strict=True)) else cleaned
    return value


def _redact_calls(message: Message, rules: RuleSet) -> tuple[dict[str, object], ...]:
    if not message.tool_calls:
        return message.tool_calls  # type: ignore[return-value]
    cleaned = redact_value(message.tool_calls, rules)
    return message.tool_calls if cleaned is message.tool_calls else tuple(cleaned)  # type: ignore


SECRETS = RuleSet(SECRET_RULES)
PERSONAL = RuleSet(PERSONAL_RULES)
