"""The meaning of a request's `model`."""

from dataclasses import replace

import pytest

from hivetune.errors import UsageError
from hivetune.serve.swap.wanted import Route, Routes, route

ROUTES = Routes(
    bases=("m",),
    labels={"helpdesk@1": "m", "helpdesk@2": "m", "coder@1": "m"},
    champions={"helpdesk": "helpdesk@1", "coder": "coder@1"},
    candidates={"helpdesk": "helpdesk@2"},
)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("helpdesk", Route("m", "helpdesk@1")),
        ("helpdesk@2", Route("m", "helpdesk@2")),
        ("helpdesk@champion", Route("m", "helpdesk@1")),
        ("helpdesk@candidate", Route("m", "helpdesk@2")),
        ("base", Route("m", "base", adapted=False)),
        ("m", Route("m", "base", adapted=False)),
    ],
)
def test_names_versions_and_aliases(model: str, found: Route) -> None:
    assert route(ROUTES, model, "session") == found


@pytest.mark.parametrize("model", ["", "nobody", "helpdesk@9", "coder@candidate", "helpdesk@", "@", "helpdesk@1@2"])
def test_what_is_not_served_is_refused_with_what_is(model: str) -> None:
    if model == "helpdesk@":
        assert route(ROUTES, model, "s").label == "helpdesk@1"
        return
    with pytest.raises(UsageError, match="is not served") as error:
        route(ROUTES, model, "s")
    assert "coder, helpdesk" in error.value.hint


def test_one_name_needs_not_be_said() -> None:
    only = Routes(bases=("m",), labels={"a@1": "m"}, champions={"a": "a@1"})
    assert route(only, "", "s").label == "a@1"


def test_a_canary_takes_its_share_of_sessions_and_keeps_them() -> None:
    canary = replace(ROUTES, canary=0.2, canaries=frozenset({"helpdesk@2"}))
    first = [route(canary, "helpdesk", str(session)).label for session in range(2000)]
    assert first == [route(canary, "helpdesk", str(session)).label for session in range(2000)]
    share = first.count("helpdesk@2") / 2000
    assert 0.17 < share < 0.23  # 0.2, three standard errors of 2,000 sessions
    assert {route(canary, "helpdesk@1", str(session)).label for session in range(50)} == {"helpdesk@1"}
    refused = replace(canary, canaries=frozenset())  # the gate did not pass it
    assert {route(refused, "helpdesk", str(session)).label for session in range(2000)} == {"helpdesk@1"}


def test_a_version_that_is_not_loaded_names_what_loads_it() -> None:
    with pytest.raises(UsageError, match="is not served") as error:
        route(ROUTES, "helpdesk@9", "s")
    assert "hivetune promote helpdesk@9" in error.value.hint
