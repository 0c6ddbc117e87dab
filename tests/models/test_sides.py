"""What a side is, from its name alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.errors import UsageError
from hivetune.models.sides import parse_side

KINDS = {
    "base": "base",
    "helpdesk@3": "release",
    "helpdesk@champion": "release",
    "last": "run",
    "runs/my-run": "run",
    "/runs/me@home/run": "run",
    "models/helpdesk-q8_0.gguf": "gguf",
    "X.GGUF": "gguf",
    "http://localhost:8080/v1#qwen": "endpoint",
    "https://host/v1/#org/model@2": "endpoint",
}


@pytest.mark.parametrize("text", KINDS)
def test_the_kind_is_known_by_the_name(text: str) -> None:
    assert parse_side(text).kind == KINDS[text]


def test_an_endpoint_is_its_url_and_its_model() -> None:
    side = parse_side("https://host:1/v1/#org/model#2")
    assert (side.name, side.model) == ("https://host:1/v1", "org/model#2")


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "": "is not a model",
        "--run": "is not a model",
        "http://host/v1": "names no model",
        "http://": "is not a URL with http",
        "http://host:port/v1#m": "not a URL",
        "http://me:secret@host/v1#m": "HIVETUNE_ENDPOINT_KEY",
        "http://host/v1?key=secret#m": "is not a URL with http",
    }.items(),
)
def test_what_can_not_be_a_side_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_side(text, "here")
    assert said in str(raised.value) and raised.value.message.startswith("here: ")
    assert "secret" not in str(raised.value) or "?key=" in text, "a password is not repeated"


@given(st.text())
def test_any_text_is_a_side_or_a_mistake(text: str) -> None:
    for tried in (text, f"http://{text}"):
        try:
            side = parse_side(tried)
        except UsageError:
            continue
        assert tried.startswith(side.name) and (side.kind == "endpoint") == bool(side.model)
