"""What of a tokenizer goes into the GGUF, and what is refused before anything is written."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_families import CHATML, tokenizer_for, write_tokenizer

from hivetune.errors import UsageError
from hivetune.release.worker.to_gguf import (
    _model_name,
    adds_space_prefix,
    is_sentencepiece,
    sentencepiece_pieces,
    special_settings,
    splitting_rule,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = write_tokenizer(tmp_path, "smollm")
    described = {"eos_ids": [tokenizer.token_to_id("<|im_end|>")], "pad_id": 0, "bos_id": None}
    (tmp_path / "hivetune.json").write_text(json.dumps(described))
    return tmp_path


def change(folder: Path, file: str, **changes: Any) -> None:
    path = folder / file
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **changes}))


def document_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return document


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_a_rule_is_recognised_from_the_tokenizer(rule: str) -> None:
    assert splitting_rule(json.loads(tokenizer_for(rule, 300).to_str())) == rule


@pytest.mark.parametrize("how", ["Removed", "NFC"])
def test_a_rule_is_recognised_however_it_is_written(how: str) -> None:
    """Keeping what matches as pieces is removing what does not match; text is NFC already but for rare rows."""
    document = json.loads(tokenizer_for("gpt-4o", 300).to_str())
    split, _ = document["pre_tokenizer"]["pretokenizers"]
    if how == "Removed":
        split |= {"behavior": "Removed", "invert": True}
    else:
        document["normalizer"] = {"type": "NFC"}
    assert splitting_rule(document) == "gpt-4o"


@pytest.mark.parametrize("prefix", [True, False])
def test_the_pieces_are_those_of_the_tokenizer(prefix: bool) -> None:
    tokenizer = tokenizer_for("sentencepiece-prefix" if prefix else "sentencepiece")
    document = json.loads(tokenizer.to_str())
    assert is_sentencepiece(document) and adds_space_prefix(document) is prefix
    size = tokenizer.get_vocab_size()
    pieces, scores, types = sentencepiece_pieces(document, size + 5)
    assert len(pieces) == len(scores) == len(types) == size + 5
    for number in (1, 5, 300, size - 1):
        assert pieces[number].decode() == tokenizer.id_to_token(number)
    kinds = [gguf.TokenType(types[number]).name for number in (0, 1, 4, size - 1, size)]
    assert kinds == ["UNKNOWN", "CONTROL", "BYTE", "NORMAL", "UNUSED"]
    merges = [left + right for left, right in document["model"]["merges"]]
    assert [scores[document["model"]["vocab"][piece]] for piece in merges[:3]] == [0, -1, -2]


def test_the_end_of_a_turn_comes_first_among_the_ends(folder: Path) -> None:
    """Llama 3's list begins with the end of a document, which no chat ever writes."""
    assert special_settings(folder)["ggml.eos_token_id"] == 2
    change(folder, "hivetune.json", eos_ids=[0, 2])
    settings = special_settings(folder)
    assert (settings["ggml.eos_token_id"], settings["ggml.eot_token_id"]) == (2, 0)


def test_the_date_of_training_stays_the_date(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    assert special_settings(folder)["chat_template"].startswith('{{ "26 Jul 2024" }}')


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
    assert special_settings(folder)["ggml.add_bos_token"] is written


def test_what_llama_cpp_would_not_reproduce_is_refused(folder: Path) -> None:
    document = document_of(folder)
    with pytest.raises(UsageError, match="splitting rule"):
        splitting_rule({**document, "pre_tokenizer": {"type": "Whitespace"}})
    with pytest.raises(UsageError, match="Lowercase"):
        splitting_rule({**document, "normalizer": {"type": "Lowercase"}})
    change(folder, "hivetune.json", eos_ids=[])
    with pytest.raises(UsageError, match="never stop"):
        special_settings(folder)


def named(folder: Path, name: str) -> str:
    change(folder, "hivetune.json", name=name)
    return _model_name(folder)


def test_the_name_is_the_bases_unless_llama_cpp_keys_tokens_on_it(folder: Path) -> None:
    """A Llama model that is called phi3 can't be loaded: llama.cpp looks for Phi-3's tokens by the name."""
    change(folder, "config.json", model_type="llama")
    assert named(folder, "smollm2-135m") == "smollm2-135m"
    assert named(folder, "my-phi3-helpdesk") == "my-phi-helpdesk"
    change(folder, "config.json", model_type="phi3")
    assert named(folder, "Phi-3") == "phi"  # Phi-4 is of the same architecture, and its tokens strip nothing
    tokens = [{**token, "rstrip": True} for token in document_of(folder)["added_tokens"]]
    change(folder, "tokenizer.json", added_tokens=tokens)
    # Some of Phi-4's strip, but it has not all that llama.cpp asks a model of that name for.
    assert named(folder, "helpdesk") == "helpdesk"
    tokens += [{**tokens[0], "id": 900 + place, "content": text} for place, text in enumerate(("<unk>", "<s>", "</s>"))]
    change(folder, "tokenizer.json", added_tokens=tokens)
    assert named(folder, "Phi-3-mini-4k-instruct") == "Phi-3-mini-4k-instruct"
    assert named(folder, "helpdesk") == "helpdesk (phi-3)"
