"""SmolLM2-135M as GGUF, against transformers and PEFT: what is shipped is what was trained (law 6)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from serve.hive import write_adapter
from transformers import AutoModelForCausalLM

from hivetune.data.render.folder import load_renderer
from hivetune.llama.backend import ServerSettings, open_backend
from hivetune.models.gguf_header import read_header
from hivetune.process.protocol import Passage
from hivetune.records import Example, Message
from hivetune.release.export import export_run
from hivetune.release.gguf import write_gguf
from hivetune.release.prove import TOP, Scores, compare_prompts, compare_scores, score_passages

pytestmark = pytest.mark.slow

# Of a log-probability in nats: llama.cpp computes with F16 weights and an F16 cache, transformers here in fp32 from
# bf16 weights. 0.009 was the largest seen.
BOUND = 0.03
SIDES = {"base": None, "tuned": 0}  # the adapter that is applied
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What does os.path.join do?": "It joins one or more parts of a path with the separator of the system.",
    "Name three colours.": "Red, green, and blue.",
    "How do I call json.dumps?": "Call json.dumps(value), which returns a string.",
    "What is 12 + 30?": "It is 42.",
    "Say hello in Spanish.": "Hola, and ¿qué tal?",
}


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter on all linear layers, strong enough that it changes the answers, of twice the usual scale."""
    folder = tmp_path_factory.mktemp("smol") / "run"
    write_adapter(smollm2, folder, 0, spread=0.04)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 2 * settings["r"]}))
    known = {"schema": 1, "name": "smol", "created": 0.0, "status": "done", "model": str(smollm2)}
    (folder / "run.json").write_text(json.dumps(known))
    return folder


@pytest.fixture(scope="module")
def passages(smollm2: Path) -> list[Passage]:
    renderer, found = load_renderer(smollm2), []
    for question, answer in ANSWERS.items():
        (rendered,) = renderer.render(Example("", "", (Message("user", question), Message("assistant", answer))))
        places = tuple(place for place, trained in enumerate(rendered.trained) if trained)
        found.append(Passage(tuple(rendered.tokens), places))
    return found


@pytest.fixture(scope="module")
def trained(run: Path, smollm2: Path, passages: list[Passage]) -> Mapping[str, Scores]:
    """What transformers and PEFT compute in float32, with the adapter and without."""
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run)

    @torch.no_grad()
    def score(passage: Passage) -> list[Any]:
        logprobs_LV = torch.log_softmax(model(torch.tensor([passage.tokens])).logits[0], -1)
        found = []
        for place in passage.places:
            values, tokens = logprobs_LV[place - 1].topk(TOP)
            likeliest = list(zip(tokens.tolist(), values.tolist(), strict=True))
            found.append([float(logprobs_LV[place - 1, passage.tokens[place]]), likeliest])
        return found

    tuned = [score(passage) for passage in passages]
    with model.disable_adapter():
        return {"base": [score(passage) for passage in passages], "tuned": tuned}


@pytest.fixture(scope="module")
def base_file(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(smollm2, None, "f16", tmp_path_factory.mktemp("base"), "base-f16.gguf")


def largest(served: Scores, trained: Scores) -> float:
    """The largest difference of the log-probability of a token that is there, of those that llama.cpp reports."""
    pairs = [pair for places in zip(served, trained, strict=True) for pair in zip(*places, strict=True)]
    assert sum(its is None for its, _ in pairs) < 4, "parts of a character alone"
    return max(abs(its[0] - was[0]) for its, was in pairs if its is not None)


def test_the_merged_file_is_the_trained_model(
    run: Path, passages: list[Passage], trained: Mapping[str, Scores]
) -> None:
    """And Ollama is told the file and its ends."""
    exported = export_run(run, "gguf")
    with open_backend(exported.path, ServerSettings(context_tokens=512)) as backend:
        served, ended = score_passages(backend, passages)
    assert largest(served, trained["tuned"]) < BOUND and ended == len(passages)
    assert compare_scores("f16", trained, {"tuned": trained["tuned"]})["effect"] == pytest.approx(1)
    assert largest(trained["base"], trained["tuned"]) > 10 * BOUND, "else the adapter would prove nothing"
    text = (exported.folder / "Modelfile").read_text()
    assert text.startswith("FROM ./smol-f16.gguf\n") and 'PARAMETER stop "<|im_end|>"' in text
    assert read_header(exported.path).settings["general.file_type"] == 1


def test_the_adapter_beside_its_base_is_the_trained_model_and_the_base_without_it_is_the_base(
    run: Path, base_file: Path, passages: list[Passage], trained: Mapping[str, Scores]
) -> None:
    adapter = export_run(run, "gguf-adapter").path
    with open_backend(base_file, ServerSettings(((adapter, 0.0),), context_tokens=512)) as backend:
        served = {name: score_passages(backend, passages, adapter=which)[0] for name, which in SIDES.items()}
    assert all(largest(served[name], trained[name]) < BOUND for name in SIDES)
    assert compare_scores("f16", trained, served)["holds"]


def test_the_served_prompt_is_the_trained_prompt(base_file: Path, smollm2: Path) -> None:
    turns = (
        "What is 12345.678 + 9?",
        "Naïve café, 你好 👩‍👩‍👧!",
        "  spaces\n\n\tand tabs  ",
        "<|im_end|> in a text",
        "x" * 200,
    )
    examples = []
    for i, text in enumerate(turns):
        asked = [Message("user", text)]
        longer = [*asked, Message("assistant", "So."), Message("user", "And?")]
        for j, messages in enumerate((asked, longer, [Message("system", "Be kind."), *longer])):
            examples.append(Example(f"{i}{j}", f"rows:{i}.{j}", (*messages, Message("assistant", "Yes."))))
    with open_backend(base_file) as backend:
        differences = compare_prompts(backend, load_renderer(smollm2), examples)
        answer = backend.complete([{"role": "user", "content": next(iter(ANSWERS))}], max_tokens=40)
    assert len(examples) == 15 and not differences
    assert answer.ended and "Paris" in answer.text  # it stops by itself
