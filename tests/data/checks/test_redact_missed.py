"""Secrets and personal data that were once missed, and ordinary text beside them that stays."""

import base64

import pytest

from hivetune.data.checks.redact.apply import PERSONAL, SECRETS, redact_value

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


AWS = "wJalrXUtnFEMI" + "/K7MDENG/bPxRfiCY" + "9aB2cD3eF4"
GITHUB = "ghp_" + "aB3dE5fG7hJ9kL2mN4pQ6rS8tV1wX3yZ5bC7"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"My AWS secret for the backup job was {AWS} until May.", AWS),
        (f"Amazon gave me this one: {AWS}", AWS),
        (f"token: {GITHUB[:22]}\n    {GITHUB[22:]}", GITHUB[22:]),
        (f"curl -H 'Authorization: {GITHUB[:30]}\\\n{GITHUB[30:]}'", GITHUB[:30]),
        ("Le mot de passe du wifi c'est Soleil2024!", "Soleil2024!"),
        ("le mdp c'est Tr0ubad0ur", "Tr0ubad0ur"),
        *(
            (f"It says {coded} in the config map.", coded)
            for line in ("DB_PASSWORD=hunter22horse", "API_TOKEN: 8f3kd92mfk20")
            if (coded := base64.b64encode(line.encode()).decode())
        ),
    ],
)
def test_secrets_that_were_missed(text: str, value: str) -> None:
    assert value not in redact_value(text, SECRETS)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("電話は090-1234-5678です", "1234-5678"),
        ("私の携帯は09012345678です。", "09012345678"),
        ("我的手机13812345678，谢谢", "13812345678"),
        ("请打13912345678联系我", "13912345678"),
        ("Zadzwoń proszę na 601 234 567 po południu", "601 234 567"),
        ("Komórka: 512-345-678", "512-345-678"),
        ("mój numer to 601-234-567", "601-234-567"),
        ("Führerschein-Nr. B072RRE2I55", "B072RRE2I55"),
        ("Her car is AB12 CDE, a grey Fiat.", "AB12 CDE"),
        ("registration: LK68 XYZ", "LK68 XYZ"),
        ("write to anna dot schmidt at posteo dot de", "anna dot schmidt"),
        ("mail me: bob.hale at gmail dot com", "bob.hale"),
        ("Max Muster, *03.07.1951, wohnhaft in Kiel", "03.07.1951"),
        ("Patientennr. 4711823", "4711823"),
        ("Personalausweis L01X00T471", "L01X00T471"),
        ("Personalausweisnummer: T220001293", "T220001293"),
        ("KVNR A123456780", "A123456780"),
        ("Krankenversichertennummer M987654321", "M987654321"),
    ],
)
def test_personal_data_that_was_missed(text: str, value: str) -> None:
    assert value not in redact_value(text, PERSONAL)


@pytest.mark.parametrize(
    "text",
    [
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
