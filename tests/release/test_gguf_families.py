"""Each architecture and splitting rule that is exported, against llama.cpp itself: same ids, same probabilities."""

from pathlib import Path

import pytest
from gguf_families import NASTY, write_model

from hivetune.data.render.folder import load_renderer
from hivetune.llama.backend import Backend, ServerSettings, open_backend
from hivetune.records import Message
from hivetune.release.gguf import write_gguf

TOP = 8
# llama.cpp keeps keys and values in F16; with weights this large (std 0.3) the largest difference seen over the
# families is 0.03 nats. A wrong rotation, norm or head order changes them by whole nats.
LOGPROB_BOUND = 0.1


def llama_cpp(backend: Backend, prompt: list[int]) -> dict[int, float]:
    """The likeliest next tokens and their log-probabilities; empty when the likeliest is a part of a character or an
    end, which llama.cpp does not report. One token a request: after such a part nothing lines up any more."""
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": TOP, "cache_prompt": False}
    found = backend.request("/completion", {**body, "lora": backend.lora}).get("completion_probabilities")
    return {entry["id"]: entry["logprob"] for entry in found[0]["top_logprobs"]} if found else {}


def transformers_scores(model, prompt: list[int]) -> list[float]:
    import torch

    with torch.no_grad():
        logits_V = model(torch.tensor([prompt])).logits[0, -1].float()
    return torch.log_softmax(logits_V, -1).tolist()


def prefixes(tokenizer) -> list[list[int]]:
    found = []
    for text in NASTY[:4]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found += [ids[:1], ids[: len(ids) // 2], ids]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma2", "phi3"])
def test_llama_cpp_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", family)
    file = write_gguf(tmp_path / "model", None, "f32", tmp_path / "gguf", "tiny.gguf")
    renderer = load_renderer(tmp_path / "model")
    tokenizer = renderer._tokenizer
    chat = [Message("system", "Be brief."), Message("user", NASTY[0])]
    with open_backend(file, ServerSettings(context_tokens=512)) as backend:
        for text in NASTY:
            expected = tokenizer.encode(text, add_special_tokens=False).ids
            body = {"content": text, "add_special": False, "parse_special": True}
            assert backend.request("/tokenize", body)["tokens"] == expected, text
        served = backend.prompt_ids([{"role": message.role, "content": message.content} for message in chat])
        assert served == renderer.prompt(chat)
        compared = 0
        for prompt in prefixes(tokenizer):
            expected_V = transformers_scores(model, prompt)
            for token, logprob in llama_cpp(backend, prompt).items():
                assert logprob == pytest.approx(expected_V[token], abs=LOGPROB_BOUND)
                compared += 1
        assert compared >= 5 * TOP
