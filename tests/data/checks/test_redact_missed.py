"""Secrets and personal data that were once missed, and ordinary text beside them that stays."""

import pytest

from hivetune.data.checks.redact import PERSONAL, SECRETS, redact_value

RANDOM = "7Kq2Lm9Xz4Rt"
STARTS = ["env", "get", "true", "null", "config", "vault", "false", "none", "settings", "fake", "dummy", "sample"]


@pytest.mark.parametrize("start", [*STARTS, "$", "@", "%", "(", "&", "*", "/", "~"])
@pytest.mark.parametrize("name", ["password: {}", "DB_PASSWORD={}", "api_key = '{}'", "the password is {}"])
def test_a_secret_may_begin_with_any_word_or_sign(start: str, name: str) -> None:
    assert RANDOM not in redact_value(name.format(start + RANDOM), SECRETS)


@pytest.mark.parametrize(
    "value",
    [
        *("$PASSWORD", "${DB_PASSWORD}", "$(pass show db)", "$db_password", "%PASSWORD%", "%(password)s", "%s"),
        *("@password", "env.DB_PASSWORD", "env:DB_PASSWORD", "getPassword()", "get_secret('db')", "config.password"),
        *("vault:secret/data/db", "true", "null", "None", "settings.PASSWORD", "process.env.PASSWORD", "fake_password"),
        *(
            "(redacted)",
            "/run/secrets/password",
            "~/.pgpass",
            "&password",
            "*****",
            "configPassword2",
            "vault/db/creds1",
        ),
    ],
)
def test_what_stands_for_a_value_stays(value: str) -> None:
    text = f"password: {value}"
    assert redact_value(text, SECRETS) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("password: $Tiger22!Moon", "$Tiger22!Moon"),
        ("DB_PASSWORD=getaway-Xk29!mQz77", "getaway-Xk29!mQz77"),
        ("my password is fakeNews44!x", "fakeNews44!x"),
        ("the password for the vpn is Sommer2024!", "Sommer2024!"),
        ("Le mot de passe du wifi c'est Soleil2024!", "Soleil2024!"),
        ("ENV POSTGRES_PASSWORD pqzGC7e3nz", "pqzGC7e3nz"),
    ],
)
def test_passwords_that_were_missed(text: str, value: str) -> None:
    assert value not in redact_value(text, SECRETS)


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact_value(redact_value(text, SECRETS), PERSONAL) == text
