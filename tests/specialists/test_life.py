"""What becomes of experts that serve: caught up, equal, unasked, or better than ever."""

import random

from hivetune.specialists.decide import AnswerCounts, ScoredUnit, is_known_better, life_steps, routed_domains


def units(
    group: str, gains: dict[str, float], *, count: int = 80, noise: float = 0.03, seed: int = 0
) -> list[ScoredUnit]:
    """Rows of 10 tokens on which each expert is so many nats a token better than the shared adapter."""
    said = random.Random(seed)
    found = []
    for number in range(count):
        shared = 20 + said.gauss(0, 2)
        nats = {name: shared - 10 * (gain + said.gauss(0, noise)) for name, gain in gains.items()}
        found.append(ScoredUnit(f"{group}{number}", 10, {"shared": shared, **nats}))
    return found


def test_an_expert_that_is_better_stays() -> None:
    assert life_steps({"a": units("a", {"a": 0.2})}, {}) == []


def test_one_that_the_shared_adapter_has_caught_up_with_is_retired() -> None:
    (step,) = life_steps({"a": units("a", {"a": 0.0}), "b": units("b", {"a": 0.0, "b": 0.3})}, {})
    assert (step.kind, step.specialists) == ("retire", ("a",))
    assert "caught up" in step.reason


def test_one_that_nobody_asks_is_retired() -> None:
    found = {"a": units("a", {"a": 0.2})}
    assert life_steps(found, {"a": AnswerCounts(4, 999)}) == []
    assert life_steps(found, {"a": AnswerCounts(5, 1000)}) == []
    (step,) = life_steps(found, {"a": AnswerCounts(4, 1000)})
    assert step.kind == "retire" and "4 of 1000" in step.reason


def test_equal_experts_become_one_and_different_ones_do_not() -> None:
    both = {"a": 0.3, "b": 0.3, "c": 0.1}
    found = {name: units(name, both, seed=number) for number, name in enumerate(both)}
    (step,) = life_steps(found, {})
    assert (step.kind, step.specialists) == ("merge", ("a", "b"))


def test_equality_needs_evidence() -> None:
    few = {"a": 0.3, "b": 0.3}
    found = {name: units(name, few, count=6, noise=0.3, seed=number) for number, name in enumerate(few)}
    assert life_steps(found, {}) == []


def test_a_new_shared_adapter_asks_for_proof_and_a_later_look_for_more() -> None:
    rows = units("a", {"a": 0.03}, noise=0.08, count=100)
    assert is_known_better(units("a", {"a": 0.2}), "a")[0]
    assert is_known_better(rows, "a", look=1)[0] and not is_known_better(rows, "a", look=30)[0]
    assert not is_known_better(units("a", {"a": 0.0}, seed=1), "a")[0]


def test_no_domain_may_be_worse_under_the_router() -> None:
    def routed(gain: float, noise: float = 0.02, count: int = 60) -> list[ScoredUnit]:
        return units("x", {"routed": gain}, noise=noise, count=count)

    same = [ScoredUnit(f"s{n}", 10, {"shared": 20.0, "routed": 20.0}) for n in range(3)]
    found = {one.domain: one for one in routed_domains({"up": routed(0.2), "down": routed(-0.2), "same": same})}
    assert (found["up"].better, found["up"].worse) == (True, False)
    assert (found["down"].better, found["down"].worse) == (False, True)
    assert (found["same"].better, found["same"].worse) == (False, False)  # nothing of it was routed: safe, with 3 rows
    (unknown,) = routed_domains({"few": routed(0.3, count=3)})
    assert unknown.worse  # not known to be safe
