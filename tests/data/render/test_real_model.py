"""The demo's rows with the real tokenizer and template of SmolLM2-135M, against transformers."""

from pathlib import Path

import pytest
from data.conftest import adds_up
from once import demo_rows

from hivetune.config import DataConfig, parse_config
from hivetune.data.prepare.prepare import check, prepare
from hivetune.data.render.dialect import template_message
from hivetune.data.render.folder import load_renderer
from hivetune.synth.demo import SYSTEM_PROMPTS

pytestmark = pytest.mark.slow


def test_the_demo_data_is_prepared_as_transformers_would(smollm2: Path, tmp_path: Path) -> None:
    path = demo_rows(tmp_path / "demo")
    data = {"path": str(path), "system_prompts": SYSTEM_PROMPTS}
    report = check(DataConfig(**data), model_folder=smollm2)
    assert adds_up(report)
    # test_demo.py says what the demo plants; near duplicates are its own text's doing.
    assert set(report.document["rejected"]) == {
        "bad-json",
        "empty-turn",
        "bad-characters",
        "unknown-layout",  # a row without its column of answers is of no known layout
    }
    assert set(report.document["set_aside"]) == {"failed"}
    assert report.document["exact_duplicates"] > 0
    snapshot = prepare(parse_config({"model": "m", "data": data}), smollm2)
    assert snapshot.num_rows == report.usable

    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2)
    renderer = load_renderer(smollm2)
    for row in range(0, snapshot.num_rows, 25):
        messages = snapshot.info(row).messages
        chat = [template_message(m) for m in messages]
        ids = theirs.apply_chat_template(chat, return_dict=False)
        prompt = theirs.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
        assert list(snapshot.tokens(row)) == ids
        assert list(renderer.prompt(messages[:-1])) == prompt
        # Trained: from the end of the prompt to the end token; the line break behind it is the template's.
        expected = [0] * len(prompt) + [1] * (len(ids) - len(prompt) - 1) + [0]
        assert list(snapshot.trained(row)) == expected
        assert ids[-2] == theirs.eos_token_id
