"""Secrets and personal data are found where they are, and ordinary text is left alone."""

import dataclasses
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from hivetune.data.checks.redact import ADVICE, NOT_TEXT, PERSONAL, SECRETS, apply_policy, redact_value
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


@pytest.mark.parametrize("name", FOUND)
def test_secrets_are_replaced(name: str) -> None:
    cleaned = redact_value(f"before {FOUND[name]} after", SECRETS)
    assert f"[SECRET:{name}]" in cleaned
    assert cleaned.startswith("before ")
    assert cleaned.endswith(" after")
    assert RANDOM not in cleaned


@pytest.mark.parametrize("text", NOT_FOUND)
def test_ordinary_text_is_no_secret(text: str) -> None:
    assert redact_value(text, SECRETS) == text


@pytest.mark.parametrize("placeholder", PEOPLE)
def test_personal_data_is_replaced(placeholder: str) -> None:
    assert placeholder in redact_value(PEOPLE[placeholder], PERSONAL)


@pytest.mark.parametrize("text", NOT_PEOPLE)
def test_numbers_without_a_checksum_are_left(text: str) -> None:
    assert redact_value(text, PERSONAL) == text


def test_no_false_alarm_in_400_pages_of_documentation() -> None:
    """At most one find in Python's language reference: the pages hold code, addresses, hashes, tables and numbers."""
    finds = [find.rule.name for text in topics.values() for rules in (SECRETS, PERSONAL) for find in rules.find(text)]
    assert len(finds) <= 1, finds


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
    assert redact_value(redact_value(value, SECRETS), PERSONAL) == {
        "password": "[SECRET:password]",
        "login": {"api_key": "[SECRET:keyed]", "plain": "hunter22"},
        "n": 5,
    }


def test_keys_that_become_equal_stay_apart() -> None:
    assert redact_value({"a.b@mail.org": 1, "c.d@mail.org": 2}, PERSONAL) == {"[EMAIL]": 1, "[EMAIL] 2": 2}


def test_names_of_rows_are_no_secrets() -> None:
    """Or every session would become the same one."""
    value = {"session_id": "9f8a7b6c5d4e3f2a1b0c", "request_id": "0b1c2d3e4f5a6b7c8d9e"}
    assert redact_value(value, SECRETS) is value


def test_this_file_holds_no_secret() -> None:
    assert "AKIA" + "ABCD" not in Path(__file__).read_text()
