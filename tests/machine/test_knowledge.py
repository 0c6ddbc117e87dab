"""The facts keep their schema, are used, and are read by a bare Python."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_machines import CASES

from hivetune.machine.cards import known_card, known_cards
from hivetune.machine.facts import facts, in_range, is_met

FACTS = [fact for kind in ("finding", "chip", "install") for fact in facts(kind)]
SOURCE = Path(__file__).parents[2] / "src"


def test_every_fact_names_its_source_and_every_finding_one_command() -> None:
    assert all(fact.source and all(url.startswith("https://") for url in fact.source) for fact in FACTS)
    assert len({fact.id for fact in FACTS}) == len(FACTS)
    assert all(fact.explanation == fact.explanation.strip() and not fact.explanation.endswith(".") for fact in FACTS)
    assert all(("fix" in fact.fields) != ("unset" in fact.fields) for fact in facts("finding"))
    for card in map(known_card, known_cards()):
        assert card["kind"] in ("cpu", "cuda", "rocm") and card["memory_gb"] > 0 and card["measured"]
        assert set(card["tflops"]) <= {"float32", "bfloat16", "float16"} and all(card["tflops"].values())


def test_every_fact_that_finds_fault_has_a_machine_in_the_tests() -> None:
    """Or a test of its own; so no rule rots unseen."""
    found = {name for case in CASES for name in case.found}
    assert {fact.id for fact in facts("finding")} - found == {"home-not-on-disk", "little-room"}


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+rocm7.2", ">=2.9,<2.14", True),
        ("2.9", "==2.9.0", True),
        ("6.18.2-arch1-1", ">=6.18,<7.1", True),
        ("5.5.0rc1", "<5.5", False),
        ("580.95.05", "<580", False),
        ("", "<1", True),
    ],
)
def test_ranges(version: str, wanted: str, fits: bool) -> None:
    assert in_range(version, wanted) is fits
    with pytest.raises(ValueError, match="range"):
        in_range(version, ">= 1 or so")


def test_what_was_not_observed_fits_nothing() -> None:
    assert not is_met({"torch": "<99"}, {}) and not is_met({"gfx": "*"}, {"gfx": None})
    assert is_met({"hidden": False, "gfx": ["gfx9*", "gfx1030"]}, {"hidden": False, "gfx": "gfx1030"})
    assert not is_met({"hidden": True}, {"hidden": "true"})


def test_a_bare_python_reads_them() -> None:
    """Set-up runs before anything is installed: -I -S leaves nothing but the standard library."""
    script = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
        "from hivetune.machine.facts import choose_install\n"
        "from hivetune.base.kernel import kfd_architectures\n"
        "print(choose_install([{'vendor': 'amd', 'gfx': 'gfx906'}], '3.12.1').backend, kfd_architectures())\n"
    )
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("rocm6.3"), ended.stderr
