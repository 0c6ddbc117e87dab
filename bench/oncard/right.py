"""The parts of card.py that say whether a device computes right: facts, proof, models, a kill and what comes after."""

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Found = Iterator[tuple[str, Any]]

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "mistral", "phi3")
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500, "initializer_range": 0.1, "pad_token_id": 0}
# Of the whole gradient, relative; what right backends reach is a third of it and less (docs/performance.md).
BOUND = {"float32": 1e-4, "bfloat16": 0.06, "float16": 0.02}
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def facts(device: str, work: Path, tiny: bool) -> Found:
    """The doctor's look: no torch is loaded yet, so this much is known even where loading it fails."""
    from hivetune.machine.doctor.findings import judge_machine
    from hivetune.machine.doctor.look import look
    from hivetune.machine.doctor.report import facts_as_text, of_this_account, report_document

    seen = look()
    yield "device", ", ".join(one.name for one in seen.cards) or seen.machine.cpu
    yield "torch", seen.software.torch.version
    yield "doctor", of_this_account().document(report_document(seen, judge_machine(seen)))
    yield "text", of_this_account().text(facts_as_text(seen)).splitlines()


def correct(device: str, work: Path, tiny: bool) -> Found:
    """Loss and each adapter's gradient of small random models of each family, on the device by precision, attention and
    kernels, against float64 on the CPU."""
    import torch

    from hivetune.run.choices import Choices

    place = torch.device(device)
    ours = "native" if place.type == "cpu" else "triton" if importlib.util.find_spec("triton") else None
    kernels = tuple(filter(None, ("torch", ours)))
    dtypes = ("float32", "bfloat16") + (("float16",) if place.type == "cuda" else ())
    worst: dict[str, float] = {}
    wrong: list[str] = []
    for family in FAMILIES[:1] if tiny else FAMILIES:
        folder = write_random(work / family, family, SMALL)
        documents = random_rows(8, 40, 12, 20, 500)
        truth, true_loss = gradients(folder, torch.float64, torch.device("cpu"), documents, Choices())
        for dtype, attention, kernel in itertools.product(dtypes, (None, "eager"), kernels):
            name = " ".join(filter(None, (family, dtype, attention or "fused", kernel)))
            choices = Choices(attention=attention, kernels=kernel)
            found, loss = gradients(folder, getattr(torch, dtype), place, documents, choices)
            each = {key: relative(found[key], truth[key]) for key in truth}
            whole = relative(torch.cat([*found.values()]), torch.cat([*truth.values()]))
            worst[dtype] = max(worst.get(dtype, 0.0), whole)
            if not whole <= BOUND[dtype]:
                wrong.append(name)
            tensor = max(each, key=lambda key: each[key])
            yield name, {"loss": loss / true_loss - 1, "gradient": whole, "worst_tensor": each[tensor], "of": tensor}
            if attention is None and kernel != "native":  # which have no graphs
                same, off = replayed(folder, getattr(torch, dtype), place, documents, kernel, truth)
                yield f"{name} graphs", {"equals_eager": same, "gradient": off}
                if not same or not off <= BOUND[dtype]:
                    wrong.append(f"{name} graphs")
            yield "worst", worst
            yield "wrong", wrong


def replayed(
    folder: Path, dtype: Any, device: Any, documents: list[Any], kernel: str, truth: dict[str, Any]
) -> tuple[bool, float]:
    """Whether a replayed step gives the bits of the same work given out kernel by kernel, and how far both are off."""
    import torch

    from hivetune.run.choices import Choices
    from hivetune.train.worker.model.fast.graphs import USES_BEFORE

    model = loaded(folder, dtype, device, Choices(graphs=True, kernels=kernel))
    names = sorted(truth)
    found = []
    for _ in range(USES_BEFORE + 2):
        model.grad_N.zero_()
        found.append(gradient_of(model, documents))
    if not model.graphs:
        raise RuntimeError(f"{folder.name} was not replayed")
    first, last = ((loss, torch.cat([views[name] for name in names])) for views, loss in (found[0], found[-1]))
    same = first[0] == last[0] and torch.equal(first[1], last[1])
    return same, relative(last[1], torch.cat([truth[name] for name in names]))


def write_random(folder: Path, family: str, sizes: dict[str, Any], on: str = "cpu") -> Path:
    """A model of these sizes with random weights in bfloat16, as transformers saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **sizes)
    with torch.device(on):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges, under ChatML: rows as text need one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: at for at, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    ).save_pretrained(folder)


def random_rows(count: int, tokens: int, system: int, answer: int, vocab: int, seed: int = 3) -> list[Any]:
    """Random ids with one common prefix; the last `answer` tokens are trained. Lengths differ by a quarter."""
    import torch

    from hivetune.train.worker.model.protocol import Document

    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(5, vocab, (system,), generator=generator)
    found = []
    for row in range(count):
        length = tokens - tokens // 8 + row % 8 * tokens // 32
        own = torch.randint(5, vocab, (length - system,), generator=generator)
        trained = torch.zeros(length, dtype=torch.bool)
        trained[-answer:] = True
        found.append(Document(row, torch.cat([common, own]), trained))
    return found


def gradients(
    folder: Path, dtype: Any, device: Any, documents: list[Any], choices: Any
) -> tuple[dict[str, Any], float]:
    """Gradient of each adapter tensor by name, flat in float64 on the CPU, and the loss; adapters that are not zero."""
    return gradient_of(loaded(folder, dtype, device, choices), documents)


def loaded(folder: Path, dtype: Any, device: Any, choices: Any) -> Any:
    """On the fast path, with adapters that are not zero."""
    import torch

    from hivetune.config import LoraConfig
    from hivetune.train.worker.model.load import load_model

    model = load_model(folder, LoraConfig(r=8, alpha=16), method="lora", dtype=dtype, device=device, choices=choices)
    if model.path != "fast":
        raise RuntimeError(f"{folder.name} is not computed on the fast path: {model.why}")
    generator = torch.Generator().manual_seed(2)
    for view in model.adapter.values():
        view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64) * 0.05)
    return model


def gradient_of(model: Any, documents: list[Any]) -> tuple[dict[str, Any], float]:
    from hivetune.train.worker.model.adapter import same_views

    loss = model.backward(documents, 1 / 100)
    views = same_views(model.grad_N, model.adapter)
    return {name: views[name].flatten().double().cpu() for name in sorted(views)}, float(loss)


def relative(found: Any, truth: Any) -> float:
    return float((found - truth).norm() / truth.norm().clamp_min(1e-30))


PARTS = {"facts": facts, "correct": correct}
