"""SmolLM2-135M as GGUF, against transformers and PEFT: what is shipped is what was trained (law 6)."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.data.render.folder import load_renderer
from hivetune.llama.backend import Backend, ServerSettings, open_backend
from hivetune.llama.prompts import compare_prompts
from hivetune.models.gguf_header import read_header
from hivetune.records import Example, Message
from hivetune.release.export import Exported, Source, export
from hivetune.release.gguf import write_gguf

pytestmark = pytest.mark.slow

NEW_TOKENS = 16
# (token id, log-probability) of each greedy token
Answers = list[list[tuple[int, float]]]
# llama.cpp computes with F16 weights and an F16 cache, transformers here in fp32 from bf16 weights: 0.009 nats was the
# largest difference seen over the common tokens of these answers.
F16_BOUND = 0.03
# 8.5 bits: 0.2 seen. Which token is likeliest may change where two are close, so answers are not compared.
Q8_BOUND = 0.6
QUESTIONS = (
    "What is the capital of France?",
    "What does os.path.join do?",
    "Name three colours.",
    "How do I call json.dumps?",
    "What is 12 + 30?",
    "Say hello in Spanish.",
)


def quiet(done: int, total: int | None) -> None: ...


def chat(question: str) -> list[Message]:
    return [Message("system", "Answer in one short sentence."), Message("user", question)]


@pytest.fixture(scope="module")
def adapter(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of rank 8 on all linear layers, strong enough that it changes the answers' probabilities."""
    import safetensors.torch
    import torch

    folder = tmp_path_factory.mktemp("adapter")
    config = json.loads((smollm2 / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = 0.03 * torch.randn(8, inputs, generator=draw)
            tensors[f"{prefix}.lora_B.weight"] = 0.03 * torch.randn(outputs, 8, generator=draw)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none"}
    settings |= {"target_modules": [name.rpartition(".")[2] for name in shapes], "base_model_name_or_path": "smollm2"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def exported(smollm2: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    parent = tmp_path_factory.mktemp("export")
    source = Source(adapter, smollm2, "smol")
    targets = [("gguf", "f16"), ("gguf", "q8_0"), ("gguf-adapter", "f16")]
    return {f"{to} {quant}": export(source, parent, to, quant=quant) for to, quant in targets}


@pytest.fixture(scope="module")
def base_gguf(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(smollm2, None, "f16", tmp_path_factory.mktemp("base"), "base-f16.gguf", quiet)


class Reference:
    """The model in transformers and PEFT, float32, with the adapter on or off."""

    def __init__(self, folder: Path, adapter: Path):
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.renderer = load_renderer(folder)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter)

    def compare(self, answers: Answers, *, adapter: bool = True) -> tuple[int, float]:
        """(answers whose every token is the likeliest here too, largest difference of a log-probability).

        Each answer is scored in one pass, given its own tokens before.
        """
        import torch

        same, largest = 0, 0.0
        for question, answer in zip(QUESTIONS, answers, strict=False):
            prompt, tokens = self.renderer.prompt(chat(question)), [token for token, _ in answer]
            with torch.no_grad(), contextlib.nullcontext() if adapter else self.model.disable_adapter():
                logits_LV = self.model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
            scores_LV = torch.log_softmax(logits_LV.float(), -1)
            same += scores_LV.argmax(-1).tolist() == tokens
            found = [float(row[token]) for row, token in zip(scores_LV, tokens, strict=True)]
            largest = max(largest, *(abs(a - b) for a, (_, b) in zip(found, answer, strict=True)))
        return same, largest


@pytest.fixture(scope="module")
def reference(smollm2: Path, adapter: Path) -> Reference:
    return Reference(smollm2, adapter)


def served(model: Path, adapters: tuple[tuple[Path, float], ...] = ()) -> Answers:
    with open_backend(model, ServerSettings(adapters=adapters, context_tokens=1024)) as backend:
        return [
            [(int(token["id"]), float(token["logprob"])) for token in scored(backend, question)]
            for question in QUESTIONS
        ]


def scored(backend: Backend, question: str) -> list[dict[str, Any]]:
    body = {
        "messages": [{"role": message.role, "content": message.content} for message in chat(question)],
        **{"max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True, "top_logprobs": 1, "cache_prompt": False},
        **({"lora": backend.lora} if backend.lora else {}),
    }
    found: list[dict[str, Any]] = backend.request("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    return found


def test_the_merged_file_and_the_adapter_beside_the_base_are_the_trained_model(
    base_gguf: Path, exported: dict[str, Exported], reference: Reference
) -> None:
    """And the base without it is the base. One answer may flip where two tokens are equally likely."""
    same, largest = reference.compare(served(base_gguf), adapter=False)
    assert same >= len(QUESTIONS) - 1 and largest < F16_BOUND
    merged = served(exported["gguf f16"].path)
    beside = served(base_gguf, ((exported["gguf-adapter f16"].path, 1.0),))
    for found in (merged, beside):
        same, largest = reference.compare(found)
        assert same >= len(QUESTIONS) - 1
        assert largest < F16_BOUND
    assert reference.compare(merged, adapter=False)[1] > 10 * F16_BOUND  # else the adapter would prove nothing


def test_eight_bits_stay_close(exported: dict[str, Exported], reference: Reference) -> None:
    _, largest = reference.compare(served(exported["gguf q8_0"].path))
    assert largest < Q8_BOUND
    assert exported["gguf q8_0"].size_bytes < 0.54 * exported["gguf f16"].size_bytes


def test_the_served_prompt_is_the_trained_prompt(base_gguf: Path, smollm2: Path) -> None:
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
    with open_backend(base_gguf) as backend:
        checked, differences = compare_prompts(backend, load_renderer(smollm2), examples)
        answer = backend.complete([{"role": "user", "content": QUESTIONS[0]}], max_tokens=40)
    assert (checked, differences) == (15, [])
    assert answer.ended and "Paris" in answer.text  # it stops by itself


def test_ollama_is_told_the_file_and_its_ends(exported: dict[str, Exported]) -> None:
    folder = exported["gguf q8_0"].folder
    text = (folder / "Modelfile").read_text()
    assert text.startswith("FROM ./smol-q8_0.gguf\n") and 'PARAMETER stop "<|im_end|>"' in text
    assert read_header(folder / "smol-q8_0.gguf").settings["general.file_type"] == 7
