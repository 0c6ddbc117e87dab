"""Who answers a request of a family, for every way to ask and everything that may be missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.routing.choose import Asking, Chosen, SpecialistTable, choose, question_of, read_table, write_table
from hivetune.routing.domains import declared_keys
from hivetune.routing.text_router import TextRouter, TextSpecialist, word_numbers

SYSTEM = declared_keys(None, None, "You test.", ())["system"]
ROUTER = TextRouter(
    (TextSpecialist("team-coder", {}, bias=3.0, threshold=0.9), TextSpecialist("team-tester", {}, threshold=None)),
    frozenset(word_numbers("fix the code")),
    least_known=0.5,
    longest=100,
)
TABLE = SpecialistTable(
    "team",
    ("team-coder", "team-tester"),
    {"agent": {"coder": "team-coder", "tester": "team-tester", "clerk": ""}, "system": {SYSTEM: "team-tester"}},
    ROUTER,
)
FAMILY = {"team-coder": "team", "team-tester": "team", "team-old": "team"}
LOADED = ("team", "team@3", "team-coder", "team-coder@1", "team-tester", "other", "base")


def asked(model: str = "team", text: str = "", servable: tuple[str, ...] = LOADED, **keys: str) -> Chosen:
    return choose({"team": TABLE}, FAMILY, Asking(model, keys, text), servable)


@pytest.mark.parametrize("model", ["team-coder", "team-coder@1", "team@3", "other", "base", "nobody", ""])
def test_what_is_named_is_taken_at_its_word(model: str) -> None:
    assert (asked(model).model, asked(model).by) == (model, "named")


@pytest.mark.parametrize("model", ["team-old", "team-coder@7", "team-old@2"])
def test_a_named_expert_that_is_gone_is_answered_by_the_shared_adapter(model: str) -> None:
    found = asked(model)
    assert (found.model, found.by) == ("team", "shared") and f"{model} can't be served now" in found.reason


def test_a_declared_key_comes_before_the_text() -> None:
    assert asked(agent="tester", text="fix the code").model == "team-tester"
    assert asked(system=SYSTEM, text="fix the code").reason == "declared: its system"
    assert asked(agent="coder", system=SYSTEM).model == "team-coder"  # the agent says it outright


@pytest.mark.parametrize("agent", ["clerk", "stranger"])
@pytest.mark.parametrize("text", ["fix the code", "bake a cake for me", ""])
def test_a_declared_domain_without_an_adapter_is_answered_as_if_nothing_was_declared(agent: str, text: str) -> None:
    assert asked(agent=agent, text=text).model == asked(text=text).model


def test_the_reason_says_what_a_declared_name_lacks() -> None:
    assert asked(agent="clerk", text="fix the code").reason.endswith("; agent=clerk has no expert")
    assert asked(agent="stranger", text="fix the code").reason.endswith("; no training row had the agent 'stranger'")
    # A system prompt that no row had says nothing of the domain: the text decides.
    assert asked(system="0" * 16, text="fix the code").by == "text"
    # Nobody trained on categories, so a category says nothing either.
    assert asked(category="any", text="fix the code").by == "text"


def test_the_case_of_a_name_and_spaces_around_it_do_not_count() -> None:
    question = question_of({"model": "team", "messages": [], "metadata": {"agent": " Coder"}})
    assert choose({"team": TABLE}, FAMILY, question, LOADED).model == "team-coder"


def test_a_text_is_routed_only_when_it_is_sure() -> None:
    assert (asked(text="fix the code").model, asked(text="fix the code").by) == ("team-coder", "text")
    assert "of its words are known" in asked(text="bake a cake for me").reason
    assert "100,000 characters" in asked(text="code" * 25_000).reason
    assert asked(text="").model == "team"


def test_a_session_stays_with_who_answered_it() -> None:
    def again(remembered: str, servable: tuple[str, ...] = LOADED, **keys: str) -> Chosen:
        return choose({"team": TABLE}, FAMILY, Asking("team", keys, "fix the code"), servable, remembered)

    assert again("team-tester").model == "team-tester"
    assert again("team").by == "session"
    assert again("team-tester", agent="coder").model == "team-coder"
    assert again("team-gone").model == "team-coder"  # who answered is not there any more


def test_an_expert_that_is_not_loaded_is_stood_in_for() -> None:
    found = asked(text="fix the code", servable=("team",))
    assert found.model == "team" and "team-coder can't be served now" in found.reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["model", "messages", "metadata", "tools", "prompt"]), JSON))
def test_any_body_is_a_question(body: dict[str, object]) -> None:
    """Whatever stands in it: a name is taken at its word, and without one nobody but the shared adapter's family."""
    found, model = choose({"team": TABLE}, FAMILY, question_of(body), LOADED), body.get("model")
    assert found.reason
    assert found.model == (model if isinstance(model, str) else "") or found.model in ("team", *TABLE.specialists)


def test_what_a_request_declares() -> None:
    body = {
        "model": "team",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "You  test."}]},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "second"},
        ],
        "metadata": {"agent": "coder", "category": "x"},
        "tools": [{"type": "function", "function": {"name": "grep"}}],
    }
    found = question_of(body, agent=None)
    assert found.text == "second" and found.keys["system"] == SYSTEM and found.keys["agent"] == "coder"
    assert found.keys.keys() == {"agent", "category", "system", "tools"}
    assert question_of(body, agent="tester").keys["agent"] == "tester"  # the header counts first


def test_the_table_is_read_as_it_was_written() -> None:
    assert read_table("team") is None
    write_table(TABLE)
    assert read_table("team") == TABLE
