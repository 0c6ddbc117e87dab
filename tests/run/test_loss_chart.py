"""The loss curve as a picture that a browser reads."""

from pathlib import Path
from xml.etree import ElementTree

from hivetune.base.journal import Journal
from hivetune.run.page import Chart, DrawnCurve, chart_file, write_loss_chart


def test_other_peoples_names_are_text_in_the_picture() -> None:
    curves = [DrawnCurve("a", "raw", [(1, 4.0), (2, 3.0)]), DrawnCurve("<script>b", "second", [(2, 3.5)], label="<i>")]
    found = ElementTree.fromstring(chart_file(Chart("<script>&\"'", curves, "")))
    assert found.find("{*}script") is None
    assert any("<script>&" in (text.text or "") for text in found.iter() if text.tag.endswith("text"))


def test_a_loss_that_was_not_finite_is_no_point(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append("step", step=1, loss=None)
    write_loss_chart(tmp_path)
    assert not (tmp_path / "loss.svg").exists()
    journal.append("step", step=2, loss=1.5)
    journal.append("validation", step=2, loss=None)
    journal.close()
    write_loss_chart(tmp_path)
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")
