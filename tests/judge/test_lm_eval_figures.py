"""What lm-evaluation-harness wrote becomes figures with paired intervals."""

from typing import Any

import pytest

from hivetune.judge.lm_eval import lm_eval_document, read_figures_of


def results(**tasks: dict[str, float | str]) -> dict[str, Any]:
    return {"results": tasks, "higher_is_better": {name: {"perplexity": False} for name in tasks}}


def samples(metric: str, values: list[float], chosen: str = "none") -> list[dict[str, Any]]:
    return [{"doc_id": number, "filter": chosen, metric: value} for number, value in enumerate(values)]


def figures(values: list[float]) -> Any:
    mean = sum(values) / len(values)
    document = results(
        colours={"alias": "colours", "acc,none": mean, "acc_stderr,none": 0.1, "sample_len": len(values)}
    )
    return read_figures_of(document, {"colours": samples("acc", values)})


def test_a_figure_of_one_model() -> None:
    (figure,) = figures([1.0, 0.0, 1.0, 1.0])
    assert (figure.task, figure.metric, figure.value, figure.stderr) == ("colours", "acc", 0.75, 0.1)
    document = lm_eval_document([("base", [figure])], {"tasks": ["colours"]})
    assert document["tuned"] is None
    assert document["figures"][0]["n"] == 4 and document["figures"][0]["base"] == {"value": 0.75, "stderr": 0.1}


def test_two_models_are_paired_by_row() -> None:
    """The same shares differ with more or less evidence, by which rows they are right on."""
    before = [1.0] * 10 + [0.0] * 30
    document = lm_eval_document([("a", figures(before)), ("b", figures([1.0] * 30 + [0.0] * 10))], {})
    (row,) = document["figures"]
    assert row["difference"] == pytest.approx(0.5)
    low, high = row["ci95"]
    assert 0 < low < 0.5 < high < 1 and row["p_holm"] < 0.001
    other = lm_eval_document([("a", figures(before)), ("b", figures([0.0] * 10 + [1.0] * 30))], {})["figures"][0]
    assert other["ci95"][1] - other["ci95"][0] > high - low


def test_p_is_adjusted_for_the_number_of_figures() -> None:
    before, after = [0.0] * 20, [1.0] * 6 + [0.0] * 14
    alone = lm_eval_document([("a", figures(before)), ("b", figures(after))], {})["figures"][0]["p_holm"]
    pairs = [
        [*figures(values), *(f.__class__(**{**vars(f), "task": f"t{n}"}) for n in range(3) for f in figures(values))]
        for values in (before, after)
    ]
    both = lm_eval_document([("a", pairs[0]), ("b", pairs[1])], {})["figures"]
    assert [row["p_holm"] for row in both] == pytest.approx([4 * alone] * 4)


def test_a_figure_that_is_no_mean_of_its_rows_has_no_interval() -> None:
    document = results(text={"perplexity,none": 20.0, "perplexity_stderr,none": "N/A"})
    (figure,) = read_figures_of(document, {"text": samples("perplexity", [1.0, 2.0, 3.0])})
    assert not figure.higher_is_better and figure.stderr is None and not figure.rows
    (row,) = lm_eval_document([("a", [figure]), ("b", [figure])], {})["figures"]
    assert row["ci95"] is None and row["p_holm"] is None and row["n"] is None


def test_other_rows_are_not_paired() -> None:
    """A limit, or a task whose data changed in between."""
    (row,) = lm_eval_document([("a", figures([1.0] * 8)), ("b", figures([0.0] * 9))], {})["figures"]
    assert row["difference"] == -1.0 and row["ci95"] is None


def test_each_filter_is_a_figure_of_its_own() -> None:
    document = results(maths={"exact_match,strict": 0.5, "exact_match,flexible": 1.0})
    rows = [*samples("exact_match", [0.0, 1.0], "strict"), *samples("exact_match", [1.0, 1.0], "flexible")]
    found = read_figures_of(document, {"maths": rows})
    assert [(figure.metric, len(figure.rows)) for figure in found] == [
        ("exact_match (strict)", 2),
        ("exact_match (flexible)", 2),
    ]
