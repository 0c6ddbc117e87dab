"""A planted fault, disliked where there is feedback: what stage 2 does about it beside other ways to train.

`make test` runs one seed and four of the ways; the proof three seeds, and ten for the ways that must never ship.
"""

import functools
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hivetune.learn import choose_stage
from train.worker.planted import END, Bench, Row, judged_by_feedback, make_bench, planted_rows, right

from hivetune.config import GateConfig
from hivetune.judge.statistics import discordant, mcnemar_p, paired_proportions

RATE, STEPS = 1e-3, 40
ARMS = ("stage1", "longer", "rated", "liked", "flipped", "flipped-liked", "sft")
ASCENT = {"weight": 1.0, "beta": 1e-6}  # sigmoid is 1/2 everywhere: -lambda on the gradient of nll, whatever it did


def labels_of(rated: Sequence[Row], seed: int, arm: str) -> list[bool]:
    """Which rated rows count as good: as they were rated, shuffled, or with every fifth label wrong."""
    labels = [not row.has_tail for row in rated]
    numbers = random.Random(f"{seed} {arm}")
    if arm == "shuffled":
        numbers.shuffle(labels)
    if arm == "flipped":
        wrong = set(numbers.sample(range(len(labels)), len(labels) // 5))
        labels = [label != (number in wrong) for number, label in enumerate(labels)]
    return labels


def bench_of(folder: Path, seed: int, arm: str) -> Bench:
    """Its own snapshot for each way to label; unlabelled and held-out rows are the same."""
    rows, rated = planted_rows(seed)
    if arm == "sft":  # everything as a good row
        return make_bench(folder / arm, [*rows, *rated])
    return make_bench(folder / arm, [*rows, *judged_by_feedback(rated, labels_of(rated, seed, arm))])


def train_arm(folder: Path, seed: int, arm: str) -> tuple[Bench, str, dict[str, Any]]:
    """The bench, the name of the run that the arm ends with, and what its worker said. Stage 1 is trained first."""
    labels = arm.removesuffix("-liked")
    bench = bench_of(folder, seed, labels if labels in ("shuffled", "flipped", "sft") else "rated")
    bench.train("stage1", epochs=14, patience=None, seed=seed)
    if arm in ("stage1", "sft"):
        return bench, "stage1", {}
    if arm == "longer":
        lora = {"r": 16, "alpha": 32, "start": str(bench.folder / "stage1")}
        said = bench.train("longer", lora=lora, max_steps=STEPS, epochs=2, patience=None, learning_rate=RATE, seed=seed)
        return bench, "longer", said
    learn = ASCENT if arm == "ascent" else {"weight": 0.0} if arm.endswith("liked") else {}
    said = bench.stage2(arm, "stage1", learn={"steps": STEPS, **learn}, learning_rate=RATE, seed=seed)
    return bench, arm, said


def evaluation(
    test: Sequence[Row], base: Sequence[tuple[int, ...]], tuned: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Of two sides' answers, as eval.json has it; the losses are told apart from it."""

    def side(answer: tuple[int, ...], good: bool) -> dict[str, Any]:
        return {"answer": "x" * len(answer), "ended": answer[-1] == END, "seconds": None, "success": good}

    both = zip(base, right(test, base), tuned, right(test, tuned), strict=True)
    answers = [
        {"group": str(number), "base": side(one, a), "tuned": side(other, b)}
        for number, (one, a, other, b) in enumerate(both)
    ]
    return {"rows": [], "answers": answers, "base": {}, "tuned": {}}


def with_losses(document: dict[str, Any], base: float, tuned: float) -> dict[str, Any]:
    rows = [{"source": "all", "group": "0", "tokens": 1, "base": base, "tuned": tuned}]
    return {**document, "rows": rows}


def ships(bench: Bench, name: str, rivals: Mapping[str, Sequence[tuple[int, ...]]]) -> bool:
    """What the station would decide, against the rivals' answers to the same prompts."""
    test = [row for row in bench.rows if row.split == "test"]
    tuned = bench.answers(name)
    losses = bench.loss(name), bench.loss("stage1")
    documents = {
        rival: with_losses(evaluation(test, answers, tuned), losses[1], losses[0]) for rival, answers in rivals.items()
    }
    return choose_stage(documents, GateConfig())[0]


def gain(test: Sequence[Row], rival: Sequence[tuple[int, ...]], tuned: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """How many more answers are without the tail, with the interval and McNemar's p."""
    base, better = right(test, rival), right(test, tuned)
    estimate = paired_proportions(base, better, [str(n) for n in range(len(test))])
    return {
        "gain": estimate.value,
        "ci95": list(estimate.ci95 or ()),
        "mcnemar_p": mcnemar_p(*discordant(base, better)),
    }


def one_seed(folder: Path, seed: int, arms: Sequence[str] = ARMS) -> dict[str, Any]:
    """Shares of answers with the tail by arm, losses of good held-out rows, and the gains that are asked."""
    answers, losses, tails = {}, {}, {}
    for arm in arms:
        bench, name, _ = train_arm(folder, seed, arm)
        answers[arm], losses[arm] = bench.answers(name), bench.loss(name)
        test = [row for row in bench.rows if row.split == "test"]
        tails[arm] = right(test, answers[arm]).count(False) / len(test)
    rivals = {name: answers[name] for name in ("stage1", "longer")}
    return {
        "seed": seed,
        "prompts": len(test),
        "tail": tails,
        "loss": losses,
        "gains": {name: gain(test, rival, answers["rated"]) for name, rival in rivals.items()},
        "ships": ships(*train_arm(folder, seed, "rated")[:2], rivals),
    }


def check_seed(found: Mapping[str, Any]) -> None:
    tail = found["tail"]
    assert 0.2 <= tail["stage1"] <= 0.45 and tail["rated"] <= 0.1
    for rival in found["gains"].values():
        assert rival["ci95"][0] > 0.1 and rival["mcnemar_p"] < 1e-3
    assert found["loss"]["rated"] <= found["loss"]["stage1"] + 0.02
    assert tail["stage1"] - tail["flipped"] >= (tail["stage1"] - tail["rated"]) / 2
    assert found["ships"]


def never_ships(folder: Path, seed: int) -> dict[str, bool]:
    """Whether shuffled labels ship, and whether ascent was stopped before its end."""
    bench, name, _ = train_arm(folder, seed, "shuffled")
    shuffled = ships(bench, name, {"stage1": bench.answers("stage1")})
    _, _, ascent = train_arm(folder, seed, "ascent")
    return {"shuffled_ships": shuffled, "ascent_stopped": bool(ascent["stopped_early"])}


@pytest.mark.slow
def test_the_fault_goes_and_ascent_is_stopped(tmp_path: Path) -> None:
    check_seed(one_seed(tmp_path, 0, ("stage1", "longer", "rated", "flipped")))
    assert train_arm(tmp_path, 0, "ascent")[2]["stopped_early"]


def kept(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was computed before a proof was stopped is not computed again."""
    if not path.exists():
        found = compute()
        path.write_text(json.dumps(found))
    known: dict[str, Any] = json.loads(path.read_text())
    return known


@pytest.mark.proof
def test_three_seeds_and_ten_that_must_not_ship(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    folder = Path(os.environ.get("HIVETUNE_PROOF_FOLDER", tmp_path))
    found, never = [], []
    for seed in range(10):
        work = folder / str(seed)
        work.mkdir(exist_ok=True)
        if seed < 3:
            found.append(kept(work / "arms.json", functools.partial(one_seed, work, seed)))
        never.append(kept(work / "never.json", functools.partial(never_ships, work, seed)))
    record_property("seeds", json.dumps(found))
    record_property("shuffled_shipped", sum(one["shuffled_ships"] for one in never))
    record_property("ascent_stopped", sum(one["ascent_stopped"] for one in never))
    record_property("of", len(never))
    for one in found:
        check_seed(one)
    assert all(one == {"shuffled_ships": False, "ascent_stopped": True} for one in never)
