"""Secrets and personal data are found where they are, and ordinary text is left alone."""

import dataclasses
from typing import Any

import pytest

from hivetune.data.checks.redact import ADVICE, NOT_TEXT, apply_policy, redact_everything
from hivetune.data.reasons import RowRefused
from hivetune.records import Example, Message

# Assembled at run time: a scanner that reads this file should find nothing.
RANDOM = "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xY"
FOUND = {
    "aws-key-id": "id AKIA" + "ABCDEFGHIJKLMNOP",
    "github": "ghp_" + "a1B2" * 9,
    "gitlab": "glpat-" + "abcDEF123456ghiJKL78",
    "slack": "xoxb-" + "123456789012-abcdefABCDEF",
    "openai": "sk-proj-" + RANDOM * 2,
    "google": "AIza" + (RANDOM + "abc"),
    "huggingface": "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "stripe": "sk_live_" + "abcdEFGH1234ijkl",
    "npm": "npm_" + "a1B2" * 9,
    "jwt": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "private-key": "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA " + "PRIVATE KEY-----",
    "url-password": "postgres://bob:" + "hunter2x@db.local/x",
    "bearer": "Authorization: Bearer " + RANDOM,
    "keyed": 'API_KEY = "' + RANDOM + '"',
    "password": "password: " + "Tr0ub4dor&3",
}
NOT_FOUND = [
    "what does chmod do?",
    "The password: must be at least eight characters",
    "password = getpass.getpass()",
    "token = os.environ['TOKEN']",
    "api_key: your_api_key_here_123456",
    "set secret=<SECRET> and token={token}",
    "key = 'AbstractFactoryBeanProvider'",
    "sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "the tokens: alpha, beta and gamma",
    "toolu_01Kq8uTidXyfgWrUM8QGBxm9 and call_7RFLWWxdlDzyCOuJeG0hvVsQ, in chatcmpl-9pQ2sYw4kT8uVb3nXz6LmRd1",
    "https://example.org:8080/path@2x",
]
PEOPLE = {
    "[EMAIL]": "write to jane.doe@mail.org please",
    "[CARD]": "card 4111 1111 1111 1111 ok",
    "[IBAN]": "pay DE89 3704 0044 0532 0130 00 now",
    "[PHONE]": "call +49 30 1234567 now",
}
NOT_PEOPLE = [
    "user@example.com and icon@2x.png",
    "4111 1111 1111 1112 fails its checksum",
    "DE89 3704 0044 0532 0130 01 fails its checksum",
    "version 1.2.3.4, ratio 3.14159265358979, 2026-01-02 03:04:05",
    "order 000-12-3456, id 12345678A",
    "1234567890123456789012345678901234567890",
    "x + 12345678 = y",
]
# Passwords that were once missed, and ordinary text that was once taken for personal data.
HIDDEN = {
    "password: $Tiger22!Moon": "$Tiger22!Moon",
    "DB_PASSWORD=getaway-Xk29!mQz77": "getaway-Xk29!mQz77",
    "my password is fakeNews44!x": "fakeNews44!x",
    "the password for the vpn is Sommer2024!": "Sommer2024!",
    "Le mot de passe du wifi c'est Soleil2024!": "Soleil2024!",
    "ENV POSTGRES_PASSWORD pqzGC7e3nz": "pqzGC7e3nz",
}
ORDINARY = [
    "The NAS has 123 456 789 files on four disks.",
    "Write sin(123456789) and read the result in radians.",
    "It will call function 12345678 times in the loop.",
    "The GPIO pin is 4711 in the device tree.",
    "There are 601 234 567 rows in the table.",
    "It took 512 345 678 steps and 880 123 456 bytes.",
    "Meet me at noon, or look at the dot com bubble.",
    "See the dot product at line dot five.",
    "The commit 3f2a9c1b7d8e4f60a1b2c3d4e5f60718293a4b5c fixes AWS uploads.",
    "On AWS we use the instance i-0abcd1234efgh5678 in eu-central-1.",
    "The matrix A * 03.07 is scaled.",
    "Chapter AB12, section CDE of the norm.",
    "订单号13812345678901234",
]
# What stands for a value: a variable, code that reads one, a path, a mask.
STAND_INS = """
    $PASSWORD ${DB_PASSWORD} $db_password %PASSWORD% %(password)s %s @password env.DB_PASSWORD env:DB_PASSWORD
    getPassword() get_secret('db') config.password vault:secret/data/db true null None settings.PASSWORD
    process.env.PASSWORD fake_password (redacted) /run/secrets/password ~/.pgpass &password ***** configPassword2
    vault/db/creds1 $(pass_show_db)
"""
STARTS = "env get true null config vault false none settings fake dummy sample $ @ % ( & * / ~"


@pytest.mark.parametrize("name", FOUND)
def test_secrets_are_replaced(name: str) -> None:
    cleaned = redact_everything(f"before {FOUND[name]} after")
    assert f"[SECRET:{name}]" in cleaned
    assert cleaned.startswith("before ") and cleaned.endswith(" after")
    assert RANDOM not in cleaned


@pytest.mark.parametrize("placeholder", PEOPLE)
def test_personal_data_is_replaced(placeholder: str) -> None:
    assert placeholder in redact_everything(PEOPLE[placeholder])


@pytest.mark.parametrize(
    ("number", "is_phone"),
    [
        ("+43 1 234 567", True),
        ("+43 1 234 56", False),
        ("+4312345678", True),
        ("+431234567", False),
        ("+431234567890123", True),
        ("+4312345678901234", False),
    ],
)
def test_a_phone_has_nine_digits_in_groups_else_ten_and_at_most_fifteen(number: str, is_phone: bool) -> None:
    assert (redact_everything(f"call {number} now") == "call [PHONE] now") == is_phone


@pytest.mark.parametrize(
    "text", [*NOT_FOUND, *NOT_PEOPLE, *ORDINARY, *(f"password: {one}" for one in STAND_INS.split())]
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact_everything(text) == text


@pytest.mark.parametrize("start", STARTS.split())
@pytest.mark.parametrize("name", ["password: {}", "DB_PASSWORD={}", "api_key = '{}'", "the password is {}"])
def test_a_secret_may_begin_with_any_word_or_sign(start: str, name: str) -> None:
    assert "7Kq2Lm9Xz4Rt" not in redact_everything(name.format(start + "7Kq2Lm9Xz4Rt"))


@pytest.mark.parametrize("text", HIDDEN)
def test_passwords_that_were_missed(text: str) -> None:
    assert HIDDEN[text] not in redact_everything(text)


def test_what_is_personal_behind_a_secret_is_found_too() -> None:
    """The digits of the token in front would make a longer number of it."""
    assert redact_everything(f"API_KEY={RANDOM}9 4111 1111 1111 1111") == "API_KEY=[SECRET:keyed] [CARD]"


def example(*messages: Message, **more: Any) -> Example:
    return Example(id="", source="rows.jsonl:1", messages=messages, **more)


def test_policies() -> None:
    row = example(Message("user", "mail a.b@mail.org"), Message("assistant", "fine"))
    assert apply_policy(row, "keep") == (row, ())
    cleaned, notes = apply_policy(row, "redact")
    assert cleaned.messages[0].content == "mail [EMAIL]"
    assert notes == (("redacted-personal", f"e-mail address in the question (message 1); {ADVICE['personal']}"),)
    with pytest.raises(RowRefused) as refused:
        apply_policy(row, "reject")
    assert refused.value.hint == "e-mail address in the question (message 1): remove it"
    clean = example(Message("user", "hello"), Message("assistant", "fine"))
    assert apply_policy(clean, "redact")[0] is clean


MAIL = "a.b@mail.org"
TOOL = {"type": "function", "function": {"name": "f", "description": f"writes to {MAIL}", "parameters": {MAIL: {}}}}
CALL = {"type": "function", "id": MAIL, "function": {"name": "send", "arguments": {"to": [MAIL], MAIL: 1, "n": 1}}}
PLACES_OF_TEXT = {
    "the system prompt (message 1)": example(Message("system", MAIL), Message("user", "q"), Message("assistant", "a")),
    "the answer (message 2)": example(Message("user", "q"), Message("assistant", MAIL)),
    "a tool's result (message 1)": example(Message("tool", MAIL), Message("assistant", "a")),
    "the name of the question (message 1)": example(Message("user", "q", name=MAIL)),
    "the call id of a tool's result (message 1)": example(Message("tool", "r", tool_call_id=MAIL)),
    "a tool call of the answer (message 1)": example(Message("assistant", "", tool_calls=(CALL,))),
    "a tool's definition": example(Message("user", "q"), tools=(TOOL,)),
    "the checker": example(Message("user", "q"), checker={"type": "contains", "value": MAIL}),
}


@pytest.mark.parametrize("place", PLACES_OF_TEXT)
def test_every_place_that_reaches_tokens_is_covered_and_named(place: str) -> None:
    cleaned, notes = apply_policy(PLACES_OF_TEXT[place], "redact")
    assert notes == (("redacted-personal", f"e-mail address in {place}; {ADVICE['personal']}"),)
    assert MAIL not in repr(cleaned)


def test_every_field_of_a_message_is_covered() -> None:
    """A field that is added to Message one day is either covered or listed as no text."""
    texts = {f.name for f in dataclasses.fields(Message)} - set(NOT_TEXT)
    values = {name: ({"x": MAIL},) if name.endswith("calls") else MAIL for name in texts}
    cleaned, _ = apply_policy(example(Message(role="user", **values)), "redact")
    assert MAIL not in repr(cleaned)


def test_a_key_says_what_its_value_is() -> None:
    value = {"password": "hunter22", "login": {"api_key": RANDOM, "plain": "hunter22"}, "n": 5}
    assert redact_everything(value) == {
        "password": "[SECRET:password]",
        "login": {"api_key": "[SECRET:keyed]", "plain": "hunter22"},
        "n": 5,
    }


def test_keys_that_become_equal_stay_apart() -> None:
    assert redact_everything({"a.b@mail.org": 1, "c.d@mail.org": 2}) == {"[EMAIL]": 1, "[EMAIL] 2": 2}


def test_names_of_rows_are_no_secrets() -> None:
    """Or every session would become the same one."""
    value = {"session_id": "9f8a7b6c5d4e3f2a1b0c", "request_id": "0b1c2d3e4f5a6b7c8d9e"}
    assert redact_everything(value) is value
