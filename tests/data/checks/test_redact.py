"""Secrets and personal data are found where they are, and ordinary text is left alone."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest

from hivetune.data.checks.redact import PERSONAL, SECRETS, apply_policy, redact_text
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

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
    "https://example.org:8080/path@2x",
]
PEOPLE = {
    "[EMAIL]": "write to jane.doe@mail.org please",
    "[CARD]": "card 4111 1111 1111 1111 ok",
    "[IBAN]": "pay DE89 3704 0044 0532 0130 00 now",
    "[SSN]": "ssn 536-90-4399",
    "[CPF]": "cpf 529.982.247-25",
    "[NHS]": "nhs 943 476 5919",
    "[DNI]": "dni 12345678Z",
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
    cleaned = redact_text(f"before {FOUND[name]} after", SECRETS)
    assert f"[SECRET:{name}]" in cleaned
    assert cleaned.startswith("before ")
    assert cleaned.endswith(" after")
    assert RANDOM not in cleaned


@pytest.mark.parametrize("text", NOT_FOUND)
def test_ordinary_text_is_no_secret(text: str) -> None:
    assert redact_text(text, SECRETS) == text


@pytest.mark.parametrize("placeholder", PEOPLE)
def test_personal_data_is_replaced(placeholder: str) -> None:
    assert placeholder in redact_text(PEOPLE[placeholder], PERSONAL)


@pytest.mark.parametrize("text", NOT_PEOPLE)
def test_numbers_without_a_checksum_are_left(text: str) -> None:
    assert redact_text(text, PERSONAL) == text


def test_no_false_alarm_in_400_pages_of_documentation() -> None:
    """At most one find in Python's language reference: the pages hold code, addresses, hashes, tables and numbers."""
    finds = [rule.name for text in topics.values() for _, _, rule in [*SECRETS.find(text), *PERSONAL.find(text)]]
    assert len(finds) <= 1, finds


def test_policies() -> None:
    messages = (Message("user", "mail a.b@mail.org"), Message("assistant", "fine"))
    assert apply_policy(messages, PERSONAL, "keep", "personal") is messages
    assert apply_policy(messages, PERSONAL, "redact", "personal")[0].content == "mail [EMAIL]"
    with pytest.raises(RowRefused, match="personal"):
        apply_policy(messages, PERSONAL, "reject", "personal")
    clean = (Message("user", "hello"), Message("assistant", "fine"))
    assert apply_policy(clean, PERSONAL, "redact", "personal") is clean


def test_tool_calls_are_covered() -> None:
    call = {"function": {"name": "send", "arguments": {"to": ["a.b@mail.org"], "n": 1}}}
    messages = (Message("user", "q"), Message("assistant", "", tool_calls=(call,)))
    cleaned = apply_policy(messages, PERSONAL, "redact", "personal")
    assert cleaned[1].tool_calls[0]["function"]["arguments"] == {"to": ["[EMAIL]"], "n": 1}


def test_this_file_holds_no_secret() -> None:
    assert "AKIA" + "ABCD" not in Path(__file__).read_text()


def test_reasoning_is_redacted() -> None:
    said = (Message("assistant", "fine", reasoning="mail jo@firma.de first"),)
    (cleaned,) = apply_policy(said, PERSONAL, "redact", "personal")
    assert cleaned.reasoning == "mail [EMAIL] first"
