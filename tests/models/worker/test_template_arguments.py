"""Values for arguments of the chat template: one choice, and every reader of the model renders alike."""

from pathlib import Path

import pytest
from data.models import FAMILIES, make_model, template_of
from train.worker.models import as_source

from hivetune.data.render.folder import load_renderer
from hivetune.data.render.template import ChatTemplate
from hivetune.errors import UsageError
from hivetune.models.prepared import WEIGHTS, fetch_model, find_prepared, folder_for
from hivetune.models.worker.prepare_model import prepare_model
from hivetune.records import Message

ASKED = (Message("user", "What is it?"),)


@pytest.fixture
def qwen3(own_home: Path, tmp_path: Path) -> str:
    name = str(as_source(make_model(tmp_path / "qwen3", template_of("qwen3"), FAMILIES["qwen3"])))
    prepare_model(name, folder_for(name))
    return name


def test_the_prompt_has_the_chosen_value_and_the_weights_lie_there_once(qwen3: str) -> None:
    plain, chosen = fetch_model(qwen3), fetch_model(qwen3, template={"enable_thinking": False})
    given = ChatTemplate(template_of("qwen3"), {"enable_thinking": False})
    asked = [{"role": "user", "content": "What is it?"}]
    assert load_renderer(chosen).text(ASKED, for_answer=True) == given.apply(asked, None, True)
    assert load_renderer(plain).text(ASKED, for_answer=True) != given.apply(asked, None, True)
    assert (chosen / WEIGHTS).samefile(plain / WEIGHTS)
    found = find_prepared(qwen3, {"enable_thinking": False})
    assert found is not None
    assert (found.folder, found.name) == (chosen, qwen3)


def test_an_argument_that_the_template_does_not_read_is_refused_with_those_that_it_reads(qwen3: str) -> None:
    with pytest.raises(UsageError, match="does not read enable_thought") as refused:
        fetch_model(qwen3, template={"enable_thought": False})
    assert refused.value.hint == "it reads: enable_thinking"
