"""The meaning of a request's `model`, and of what it declares."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from serve.test_release_watch import register

from hivetune.base.database import open_database
from hivetune.errors import UsageError
from hivetune.release.registry import retire
from hivetune.serve import route
from hivetune.serve.route import BASE, Domain, Routes, Wanted, Withdrawn, wanted

ROUTES = Routes(
    Wanted(candidates={"helpdesk": "helpdesk@2"}),
    "m",
    frozenset(("helpdesk@1", "helpdesk@2", "coder@1")),
    champions={"helpdesk": "helpdesk@1", "coder": "coder@1"},
)
ALONE = Routes(Wanted(), "qwen", frozenset(("qwen@1",)), {"qwen": "qwen@1"})
BILLING = Domain("qwen-billing", "agent", "billing", "You answer about bills.")
DOMAINS = Routes(
    Wanted(domains={"qwen": (BILLING, Domain("qwen-it", "agent", "it"))}),
    "m",
    frozenset(("qwen@1", "qwen-billing@1")),
    champions={"qwen": "qwen@1", "qwen-billing": "qwen-billing@1"},  # the one of `it` is not loaded
)


@pytest.mark.parametrize(
    ("routes", "model", "declared", "label"),
    [
        (ROUTES, "helpdesk", {}, "helpdesk@1"),
        (ROUTES, "helpdesk@2", {}, "helpdesk@2"),
        (ROUTES, "helpdesk@champion", {}, "helpdesk@1"),
        (ROUTES, "helpdesk@", {}, "helpdesk@1"),
        (ROUTES, "helpdesk@candidate", {}, "helpdesk@2"),
        (ROUTES, "base", {}, "base"),
        (ROUTES, "m", {}, BASE),
        (ALONE, "", {}, "qwen@1"),  # one name needs not be said
        (ALONE, "qwen", {}, "qwen@1"),  # a release precedes a base of its name
        (ALONE, "base", {}, "base"),
        (DOMAINS, "qwen", {"agent": "billing"}, "qwen-billing@1"),
        (DOMAINS, "", {"agent": "billing"}, "qwen-billing@1"),
        (DOMAINS, "qwen", {"system": "You answer about bills."}, "qwen-billing@1"),
        (DOMAINS, "qwen", {"system": "You answer about bills.", "agent": "sales"}, "qwen@1"),
        (DOMAINS, "qwen", {"agent": "it"}, "qwen@1"),
        (DOMAINS, "qwen", {"category": "billing"}, "qwen@1"),
        (DOMAINS, "qwen@1", {"agent": "billing"}, "qwen@1"),  # a version is what it says
        (DOMAINS, "qwen-billing", {}, "qwen-billing@1"),
    ],
)
def test_names_versions_aliases_and_domains(routes: Routes, model: str, declared: dict[str, str], label: str) -> None:
    assert routes.find(model, "session", declared) == label


def test_a_system_prompt_that_the_shared_release_has_too_declares_nothing() -> None:
    same = {"qwen@1": {"system": "You answer about bills."}}
    shared = replace(DOMAINS, wanted=replace(DOMAINS.wanted, generation=same))
    assert shared.find("qwen", "s", {"system": "You answer about bills."}) == "qwen@1"


@pytest.mark.parametrize("model", ["", "nobody", "helpdesk@9", "coder@candidate", "@", "helpdesk@1@2"])
def test_what_is_not_served_is_refused_with_what_is(model: str) -> None:
    with pytest.raises(UsageError, match="is not served") as error:
        ROUTES.find(model, "s")
    assert "coder, helpdesk" in error.value.hint
    assert ("hivetune promote helpdesk@9" in error.value.hint) == (model == "helpdesk@9")


def test_a_canary_takes_its_share_of_sessions_and_keeps_them() -> None:
    passed = replace(ROUTES.wanted, passed=frozenset({"helpdesk@2"}))
    canary = replace(ROUTES, canary=0.2, wanted=passed)
    first = [canary.find("helpdesk", str(session)) for session in range(2000)]
    assert first == [canary.find("helpdesk", str(session)) for session in range(2000)]
    share = first.count("helpdesk@2") / 2000
    assert 0.17 < share < 0.23  # 0.2, three standard errors of 2,000 sessions
    assert {canary.find("helpdesk@1", str(session)) for session in range(50)} == {"helpdesk@1"}
    refused = replace(ROUTES, canary=0.2)  # the gate did not pass it
    assert {refused.find("helpdesk", str(session)) for session in range(2000)} == {"helpdesk@1"}


def test_the_champion_the_one_before_it_and_the_candidate_are_loaded(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All versions were, up to eight of each name."""
    monkeypatch.setattr(route, "adapter_of", lambda release, base=None: Path(release.label))
    for version, alias in enumerate(("champion", "champion", "champion", "candidate"), 1):
        register(version, alias=alias)
    with closing(open_database()) as database:
        found = wanted(database)
    assert found.deployment is not None and found.labels == {"a@2", "a@3", "a@4"}
    assert (found.champions, found.candidates) == ({"a": "a@3"}, {"a": "a@4"})
    assert found.deployment.required == {"a@3", "a@4"}, "so a rollback restarts nothing"


def test_a_name_that_was_retired_says_so(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "not served", like a name that never was."""
    monkeypatch.setattr(route, "adapter_of", lambda release, base=None: Path(release.label))
    register(1, alias="champion")
    with closing(open_database()) as database:
        retire(database, "a", by="me", reason="too slow")
        for model in ("a", "a@champion", "a@1"):
            with pytest.raises(Withdrawn, match=f"{model} was retired: too slow"):
                Routes(wanted(database), "m").find(model, "s")
        assert Routes(wanted(database), "a").find("a", "s") == BASE, "a base outlives a release of its name"
        register(2, alias="champion")
        assert wanted(database).refused == {}


def test_a_version_is_no_name_to_serve(own_home: Path) -> None:
    """The gateway started, and served nothing for ever."""
    with closing(open_database()) as database, pytest.raises(UsageError, match="give the name alone") as refused:
        wanted(database, ("helpdesk@1",))
    assert refused.value.hint == "serve helpdesk, and ask for the model helpdesk@1"
