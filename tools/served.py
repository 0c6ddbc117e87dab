"""From rows to an answer over HTTP: a family's tiny random model and adapter through llama.cpp's converter and server.

Rendered rows, merged and beside the base in f32, the proof of release/prove.py, token ids, one answer.
`tools/families.py` puts the result into its table, tests/release/test_served_families.py asks for some.
"""

import ast
import functools
import json
import math
import multiprocessing
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_models import tiny_config

# Rows whose prompts and answers are compared.
ROWS = [
    ("What is 12345.678 + 9?", "Twelve thousand, and 9 more: 12354.678!"),
    ("Naïve café, 你好 👩‍👩‍👧?", "Yes: naïve is spelled so; 你好."),
    ("  two  spaces\n\n\tand tabs  ", "def f(x):\n    return x // 2"),
    ("Say it's so; don't WE'LL?", "It's so, and they'LL agree."),
    ("Which of 3, 17 and 256 is prime?", "Three and 17 are; 256 is two to the eighth."),
    ("Translate: guten Morgen", "Good morning, and have a nice day."),
    ("List three colours.", "1. Red\n2. Green\n3. Blue, like the sky"),
    ("Why is the sky blue?", "Short waves are scattered more than long ones, so it looks blue."),
]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QUANT = "f32"
DEMO: list[Path] = []  # the prepared demo model, where a caller has it; else it is fetched
# Of the outputs of a matrix whose inputs are 1. With 1.5 the rounding of q8_0 grew from layer to layer, and with it
# the error of the slope: 0.97 of gpt-oss's effect arrived, with 0.7 it is 0.997.
SPREAD, ADAPTER_SPREAD = 0.7, 0.6
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
# What converters of single families look for, whatever the tokenizer is.
OWN_SPECIALS = {"glm4": ("[gMASK]", "<|endoftext|>", "<|observation|>")}
OWN_SPECIALS |= dict.fromkeys(("glm", "glm4_moe", "glm4_moe_lite", "solar_open"), OWN_SPECIALS["glm4"])
SENTENCEPIECE = ("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "phi3", "ernie4_5")
# Widths that are whole blocks of q8_0, where the common ones are not.
WIDER = {"moe_intermediate_size": 32, "head_dim": 32, "v_head_dim": 32, "max_position_embeddings": 512}
# llama.cpp divides by the root of a head's width, as all published Gemmas do. A window that it does not have is cut to.
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    # llama.cpp caps Gemma 4's logits at 30 where the file names no cap (llama-hparams.h), as all published ones do.
    "gemma4_text": {"final_logit_softcapping": 30.0},
    **{kind: {"sliding_window": 256} for kind in ("mistral", "mixtral", "phi3", "ministral", "starcoder2")},
    "ministral3": {"sliding_window": None},
    # The widths that these families always have, and llama.cpp takes for granted.
    "phi": {"num_key_value_heads": 4, "intermediate_size": 256},
    "olmoe": {"num_key_value_heads": 4},
    "gpt2": {"n_inner": 256},
    "gpt_bigcode": {"n_inner": 256},
    "falcon": {"ffn_hidden_size": 256},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granite": {"attention_multiplier": 0.25},
    "qwen3_moe": {"norm_topk_prob": True},  # llama.cpp divides by the experts' sum, as all published ones do
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    # A layer of full attention after three others: llama.cpp counts, it reads no list.
    **{
        kind: {
            **{"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},  # as published ones; narrow heads are noisy
        }
        for kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    },
}


def serve_family(kind: str, folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return how far a family's tiny model comes: "gguf", "lora" and "served" with "effect" and "typical", or
    "failed" with the reason. Writes below `folder`."""
    row: dict[str, Any] = {}
    try:
        _write_model(kind, folder, changes or {})
        trained = _write_adapter(folder)
        for station in (_whole, _beside):
            station(folder, trained, row)
    except Exception as error:  # noqa: BLE001 (the table is there to hold any)
        traceback.print_exc()
        words = str(getattr(error, "message", "") or error).replace(str(folder), "").splitlines() or [""]
        row["failed"] = f"{type(error).__name__}: {words[0]}"[:300]
    return row


def draw(module: Any, spread: float) -> None:
    """Draw weights, norms and biases; `spread` of the outputs of a matrix whose inputs are 1."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=spread / math.sqrt(parameter.shape[-1]))
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))


def _write_model(kind: str, folder: Path, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hivetune.models.worker.prepare_model import prepare_model

    (folder / "tiny").mkdir()
    tokenizer = _write_tokenizer(kind, folder / "tiny")
    values = tiny_config(kind).to_dict()
    size = max(tokenizer.get_vocab().values()) + 1
    words = size if kind == "gemma4_text" else -(-size // 64) * 64  # embeddings are often padded
    wanted = {**{key: value for key, value in WIDER.items() if values.get(key)}, "vocab_size": words}
    if "vocab_size_per_layer_input" in values:
        wanted["vocab_size_per_layer_input"] = words
    wanted |= {**OWN.get(kind, {}), **changes}
    values.pop("model_type")
    config = AutoConfig.for_model(kind, **{**values, **wanted})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw(model, SPREAD)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if kind == "gemma4_text" and "q_norm" in name:
                parameter.mul_(0.2)  # its scores are not divided by the root of a head's width
    model.save_pretrained(folder / "tiny")
    (folder / "tiny/generation_config.json").unlink(missing_ok=True)
    prepare_model(str(folder / "tiny"), folder / "prepared")


def _write_tokenizer(kind: str, folder: Path) -> Any:
    """Write and return a tokenizer: of a family of byte-level ones the demo model's, since llama.cpp's script knows
    published vocabularies only."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    settings = {"eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    template, specials = TEMPLATE, [*SPECIALS, *OWN_SPECIALS.get(kind, ())]
    if kind in SENTENCEPIECE:
        vocabulary = {token: number for number, token in enumerate(specials)}
        for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *map(chr, range(33, 127))]:
            vocabulary.setdefault(piece, len(vocabulary))
        merges = [("t", "h"), ("th", "e"), ("\u2581", "t"), ("i", "n")]
        for left, right in merges:
            vocabulary.setdefault(left + right, len(vocabulary))
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        replaced = normalizers.Replace(" ", "\u2581")
        # As in its published tokenizer, every text segment of Phi-3 begins with a space of its own.
        prefixed = normalizers.Sequence([normalizers.Prepend("\u2581"), replaced])
        tokenizer.normalizer = prefixed if kind == "phi3" else replaced
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps)
        if kind == "gemma4_text":  # whose prompts llama.cpp always begins so, as its template does
            settings["bos_token"], template = "<s>", "{{ bos_token }}" + TEMPLATE
    else:
        tokenizer = Tokenizer.from_str(known_tokenizer(*specials))
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return tokenizer


@functools.cache
def known_tokenizer(*specials: str) -> str:
    """Return a tokenizer.json whose word splitting llama.cpp's script knows, with these tokens besides.

    The script knows the demo model's by the ids of one text. Tokens and merges that this text does not take are left
    out: with all 49,000 most of a family's time went into reading and writing them.
    """
    from tokenizers import Tokenizer

    from hivetune.models.prepared import fetch_model
    from hivetune.release.gguf import find_converter

    file = (DEMO[0] if DEMO else fetch_model("smollm2-135m")) / "tokenizer.json"
    known = json.loads(file.read_text(encoding="utf-8"))
    script = (find_converter() / "conversion/base.py").read_text(encoding="utf-8")
    (text,) = re.findall(r"^ +chktxt = ('.*')$", script, re.MULTILINE)
    vocabulary, merges = known["model"]["vocab"], []
    kept = {*Tokenizer.from_file(str(file)).encode(ast.literal_eval(text)).tokens}
    kept |= {token for token in vocabulary if len(token) == 1} | {each["content"] for each in known["added_tokens"]}
    for left, right in reversed(
        [merge.split(" ") if isinstance(merge, str) else merge for merge in known["model"]["merges"]]
    ):
        if left + right in kept:
            kept |= {left, right}
            merges.append([left, right])
    first = max(vocabulary.values()) + 1
    known["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token in kept}
    known["model"]["vocab"] |= {token: first + number for number, token in enumerate(specials)}
    known["model"]["merges"] = merges[::-1]
    return json.dumps(known)


def _passages(folder: Path) -> list[Any]:
    from hivetune.data.render.folder import load_renderer
    from hivetune.process.protocol import Passage
    from hivetune.records import Example, Message

    renderer, found = load_renderer(folder / "prepared"), []
    for number, (question, answer) in enumerate(ROWS):
        messages = (Message("user", question), Message("assistant", answer))
        (rendered,) = renderer.render(Example(str(number), f"rows:{number}", messages))
        places = [place for place, trained in enumerate(rendered.trained) if trained]
        found.append(Passage(tuple(rendered.tokens), tuple(places)))
    return found


def _write_adapter(folder: Path) -> dict[str, Any]:
    import torch

    from hivetune.config import LoraConfig
    from hivetune.process.child import Heartbeat
    from hivetune.release.prove import TOP
    from hivetune.release.worker.score_passages import score_all
    from hivetune.train.worker.model.adapter import write_adapter
    from hivetune.train.worker.model.general import load_general

    lora = LoraConfig(r=4, alpha=8)
    device = torch.device("cpu")
    model = load_general(folder / "prepared", lora, method="lora", dtype=torch.float32, device=device, why="")
    with torch.no_grad():
        for name, view in model.adapter.items():
            view.normal_(std=ADAPTER_SPREAD / math.sqrt(view.shape[1] if ".lora_A." in name else lora.r))
    (folder / "adapter").mkdir()
    write_adapter(folder / "adapter", model.adapter, lora, "tiny", None)
    passages = _passages(folder)
    tuned = score_all(model.module, passages, TOP, Heartbeat(None))
    model.adapter_state.on = False
    base = score_all(model.module, passages, TOP, Heartbeat(None))
    return {"tuned": tuned, "base": base}


def _gguf(folder: Path, name: str, adapter: Path | None, *, alone: bool = False) -> Path:
    from hivetune.process.child import Heartbeat
    from hivetune.process.protocol import WriteGguf
    from hivetune.release.gguf import find_converter
    from hivetune.release.worker.to_gguf import write

    quant = None if alone else QUANT
    write(WriteGguf(folder / "prepared", adapter, folder / name, quant, find_converter()), Heartbeat(None))
    return folder / name


def _whole(folder: Path, trained: dict[str, Any], row: dict[str, Any]) -> None:
    """Serve the adapter merged in q8_0, and its base, and compare both with what was trained."""
    from hivetune.llama.backend import ServerSettings, open_backend
    from hivetune.models.gguf_header import read_header
    from hivetune.release.prove import compare_scores, score_passages

    row["gguf"] = False
    files = [_gguf(folder, f"{name}.gguf", adapter) for name, adapter in (("base", None), ("m", folder / "adapter"))]
    row["gguf"] = True
    header = read_header(files[1]).settings
    row["name"] = header["general.name"]
    row["context"] = header[f"{header['general.architecture']}.context_length"]
    passages, said = _passages(folder), []
    for file in files:
        with open_backend(file, ServerSettings(device="cpu", warm_up=False, threads=1)) as backend:
            said.append(score_passages(backend, passages)[0])
            if file is files[0]:
                _check_ids(folder, backend)
            else:
                row["answer_tokens"] = backend.complete([{"role": "user", "content": "Hi"}], max_tokens=8).new_tokens
    trained["served_base"] = said[0]
    found = compare_scores(QUANT, trained, {"base": said[0], "tuned": said[1]})
    row |= {"served": found["holds"], "effect": round(found["effect"], 4), "typical": round(found["typical"], 4)}
    row["base_typical"] = round(found["base_typical"], 4)
    if found["problems"]:
        row["problems"] = found["problems"]


def _check_ids(folder: Path, backend: Any) -> None:
    from hivetune.data.render.folder import load_renderer
    from hivetune.records import Example, Message
    from hivetune.release.prove import compare_prompts

    rows = [(Message("user", question), Message("assistant", answer)) for question, answer in ROWS]
    examples = [Example(str(number), f"rows:{number}", messages) for number, messages in enumerate(rows)]
    differences = compare_prompts(backend, load_renderer(folder / "prepared"), examples)
    assert not differences, f"other token ids: {differences[0]}"


def _beside(folder: Path, trained: dict[str, Any], row: dict[str, Any]) -> None:
    """Serve the adapter alone, beside the base in q8_0, and compare it with what was trained."""
    from hivetune.llama.backend import ServerSettings, open_backend
    from hivetune.release.prove import compare_scores, score_passages

    row["lora"] = False
    file = _gguf(folder, "adapter.gguf", folder / "adapter", alone=True)
    settings = ServerSettings(adapters=((file, 0.0),), device="cpu", warm_up=False, threads=1)
    with open_backend(folder / "base.gguf", settings) as backend:
        said, _ = score_passages(backend, _passages(folder), adapter=0)
    found = compare_scores(QUANT, trained, {"base": trained["served_base"], "tuned": said})
    row |= {"lora": found["holds"], "lora_effect": round(found["effect"], 4)}
    if found["problems"]:
        row["lora_problems"] = found["problems"]


def apart(work: Callable[[str, Path], dict[str, Any]], kind: str, limit_s: float) -> dict[str, Any] | None:
    """Return `work(kind, folder)` from a process of its own, which inherits what this one has imported; None if it
    crashed or took too long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, kind, sender))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] | None = receiver.recv() if receiver.poll(limit_s) else None
    except EOFError:
        found = None
    process.kill()
    process.join()
    return found


def _child(work: Callable[[str, Path], dict[str, Any]], kind: str, sender: Any) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        del sys.modules[name]  # the caller may have imported the one of pip, which is older than the converter's own
    with tempfile.TemporaryDirectory() as folder:
        sender.send(work(kind, Path(folder)))
