"""A small random Llama as a prepared folder, made by the real preparation from a transformers folder."""

import json
from pathlib import Path

import pytest
import torch
from data.models import make_model
from engine.models import write_model

from hivetune.engine.prepare_model import prepare


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small products do not gain from two threads, and idle ones cost on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` leaves it: 2 layers, 32 wide, a chat template, a trained tokenizer."""
    folder = make_model(tmp_path_factory.mktemp("source") / "tiny")
    for name in ("hivetune.json", "manifest.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = max(max(tokenizer["model"]["vocab"].values()), *(t["id"] for t in tokenizer["added_tokens"])) + 1
    eos = next(t["id"] for t in tokenizer["added_tokens"] if t["content"] == "<|im_end|>")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    write_model(folder, vocab_size=vocab, eos_token_id=eos, tie_word_embeddings=True, **sizes)
    return folder


@pytest.fixture(scope="session")
def tiny_model_folder(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its prepared folder."""
    target = tmp_path_factory.mktemp("prepared") / "tiny"
    prepare(str(tiny_source), target)
    return target
