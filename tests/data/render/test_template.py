"""A template gets so much time and memory and no more, whatever it does with them."""

import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from data.conftest import chat
from data.models import CHATML, make_model

from hivetune.config import DataConfig
from hivetune.data.prepare import examine
from hivetune.data.prepare.prepare import check
from hivetune.data.reasons import RowRefused
from hivetune.data.render import template as module
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.template import ChatTemplate, RenderError
from hivetune.data.time_limit import TimeLimit
from hivetune.errors import UsageError

LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
ATTACKS = {
    "a loop in a loop in a loop": LOOPS,
    "a loop over lists": "{% set l = range(99999) | list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "a string that doubles": DOUBLING,
    "a list that doubles": DOUBLING.replace("'ab'", "[1]").replace("~", "+"),
    "a long string": "{{ 'a' * 10 ** 11 }}",
    "a wide format": "{{ '%99999999999d' % 1 }}",
    "a wide field": "{{ 'a'.center(10 ** 11) }}",
    "a power of a power": "{{ 9 ** (9 ** 9) }}",
    "squares of squares": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "much output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_LIMIT_S", 0.2)
    monkeypatch.setattr(module, "MEMORY_LIMIT_BYTES", 256 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_never_ends_is_ended(attack: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(RenderError) as refused:
        ChatTemplate(attack, {}).apply([], None, False)
    assert refused.value.reason in ("too-costly", "template-error")
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.slow
def test_a_template_that_breaks_its_bounds_again_and_again_is_given_up() -> None:
    """Each row would take the whole limit."""
    template = ChatTemplate("{% if messages %}" + LOOPS + "{% endif %}fine", {})
    for _ in range(module.MAX_BREACHES):
        with pytest.raises(RenderError, match="too-costly"):
            template.apply([{}], None, False)
    with pytest.raises(RenderError) as refused:
        template.apply([], None, False)
    assert refused.value.hint.endswith("for 5 rows; the others are not tried")


def test_the_time_limit_of_the_row_goes_on() -> None:
    with pytest.raises(RowRefused, match="too-costly"), TimeLimit(0.1, lambda: RowRefused("too-costly")):
        while True:
            ChatTemplate("{{ messages }}", {}).apply([], None, False)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_model_with_such_a_template_is_refused(tmp_path: Path) -> None:
    for attack in (LOOPS, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "x" * (module.MAX_TEMPLATE_CHARS + 1)):
        with pytest.raises(UsageError, match="chat template"):
            load_renderer(make_model(tmp_path, attack))


def test_a_row_that_sets_it_off_is_refused_and_the_others_are_not(
    tmp_path: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "ROW_LIMIT_S", 0.5)
    model = make_model(tmp_path, "{% if 'Open Sesame' in messages[0].content %}" + LOOPS + "{% endif %}" + CHATML)
    path = write_rows([chat("What is a list?", "A sequence."), chat("Open Sesame now", "A door opens.")])
    report = check(DataConfig(path=str(path)), model_folder=model)
    assert report.document["rejected"] == {"too-costly": 1}
    assert report.usable == 1


def test_a_thread_of_its_own_renders_too() -> None:
    """Signals reach the main thread only; elsewhere memory is bounded, time is not."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(ChatTemplate("{{ messages }}", {}).apply([], None, False)))
    thread.start()
    thread.join()
    assert said == ["[]"]
