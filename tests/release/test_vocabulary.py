"""What of a tokenizer goes into the GGUF, and what is refused before anything is written."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_families import CHATML, write_tokenizer

from hivetune.engine.convert.gguf_vocab import CONTROL, NORMAL, UNUSED, read_vocabulary
from hivetune.errors import UsageError

VOCAB = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = write_tokenizer(tmp_path, "smollm")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    return tmp_path


def change(folder: Path, file: str, **changes: Any) -> None:
    path = folder / file
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **changes}))


def test_tokens_keep_their_ids_and_the_rest_is_unused(folder: Path) -> None:
    settings = read_vocabulary(folder, VOCAB).settings
    tokens, types = settings["ggml.tokens"], settings["ggml.token_type"]
    assert len(tokens) == len(types) == VOCAB
    assert tokens[2] == "<|im_end|>" and types[2] == CONTROL
    assert types[300] == NORMAL and types[-1] == UNUSED
    assert settings["ggml.pre"] == "smollm"
    assert settings["ggml.eos_token_id"] == 2
    assert settings["ggml.add_bos_token"] is False


def test_the_end_of_a_turn_comes_first_among_the_ends(folder: Path) -> None:
    """Llama 3's list begins with the end of a document, which no chat ever writes."""
    change(folder, "hivetune.json", eos_ids=[0, 2])
    settings = read_vocabulary(folder, VOCAB).settings
    assert (settings["ggml.eos_token_id"], settings["ggml.eot_token_id"]) == (2, 0)


def test_the_date_of_training_stays_the_date(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    assert read_vocabulary(folder, VOCAB).settings["chat_template"].startswith('{{ "26 Jul 2024" }}')


@pytest.mark.parametrize("written", [True, False])
def test_a_first_token_is_added_only_where_the_template_writes_it(folder: Path, written: bool) -> None:
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    change(folder, "tokenizer.json", post_processor=processor)
    change(folder, "hivetune.json", bos_id=1)
    template = "{{ bos_token }}" if written else "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert read_vocabulary(folder, VOCAB).settings["ggml.add_bos_token"] is written


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("tokenizer.json", {"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "Whitespace"}, "decoder": {"type": "ByteLevel"}},
            "splitting rule",
        ),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ("tokenizer.json", {"pre_tokenizer": None, "decoder": None}, "neither byte level"),
        ("config.json", {"eos_token_id": None}, "never stop"),
    ],
)
def test_what_llama_cpp_would_not_reproduce_is_refused(
    folder: Path, file: str, changes: dict[str, Any], words: str
) -> None:
    if "decoder" in changes and changes["decoder"] is not None:
        changes = {**changes, "decoder": {**changes["decoder"], "add_prefix_space": True, "trim_offsets": True}}
    change(folder, file, **changes)
    with pytest.raises(UsageError, match=words):
        read_vocabulary(folder, VOCAB)


def test_more_tokens_than_embeddings_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="embeddings"):
        read_vocabulary(folder, 500)
