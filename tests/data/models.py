"""Model folders for tests: a tokenizer trained on the spot (0.1 s) under a real chat template."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# Published chat templates by name, each with its source, its end tokens and the chats that it can't say.
TEMPLATES = {
    entry["name"]: entry
    for entry in map(json.loads, (Path(__file__).parent / "templates.jsonl").read_text(encoding="utf-8").splitlines())
}
LICENCE = Path(__file__).parents[2] / "LICENSE"
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """What a model family's tokenizer knows besides its template."""

    template: str  # name in templates.jsonl
    specials: tuple[str, ...]
    eos: tuple[str, ...]
    bos: str | None = None
    pad: str | None = None
    sentencepiece: bool = False


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
PHI = ("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>")
FAMILIES = {
    "qwen2_5": Family("qwen2_5", QWEN, ("<|im_end|>", "<|endoftext|>"), pad="<|endoftext|>"),
    "qwen3": Family("qwen3", QWEN, ("<|im_end|>", "<|endoftext|>"), pad="<|endoftext|>"),
    "llama3": Family("llama3", LLAMA, ("<|eot_id|>", "<|end_of_text|>"), bos="<|begin_of_text|>"),
    "llama3_2": Family("llama3_2", LLAMA, ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), bos="<|begin_of_text|>"),
    "gemma": Family("gemma", GEMMA, ("<eos>", "<end_of_turn>"), bos="<bos>", pad="<pad>", sentencepiece=True),
    "gemma3": Family("gemma3", GEMMA, ("<eos>", "<end_of_turn>"), bos="<bos>", pad="<pad>", sentencepiece=True),
    "phi3": Family("phi3", PHI, ("<|endoftext|>", "<|end|>"), pad="<|endoftext|>"),
    "mistral": Family(
        "mistral", ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), ("</s>",), bos="<s>", sentencepiece=True
    ),
}


# What a template writes in the form of a control token.
CONTROL = re.compile(
    r"<\|[^|>\n{}]{1,40}\|>|<｜[^｜>\n]{1,40}｜>|\[/?[A-Z_]{3,20}\]|</?s>|<(?:start|end)_of_\w+>|<SPECIAL_\d+>|<\|?turn\|?>"
    r"|\]~!?b[\[\]]|\[e~\["
)


def corpus() -> dict[str, Family]:
    """The families of templates.jsonl, by name; their tokenizers know every control token of their template."""
    known = {name: entry for name, entry in TEMPLATES.items() if "eos" in entry}
    return {name: _corpus_family(name, tuple(entry["eos"]), entry["bos"]) for name, entry in known.items()}


def _corpus_family(name: str, eos: tuple[str, ...], bos: str | None) -> Family:
    written = CONTROL.findall(template_of(name))
    specials = dict.fromkeys(["<|made-for-padding|>", *([bos] if bos else []), *eos, *written])
    return Family(name, tuple(specials), eos, bos, pad="<|made-for-padding|>")


def template_of(name: str) -> str:
    return str(TEMPLATES[name]["template"])


def make_family(folder: Path, name: str) -> Path:
    """The folder of a model of this family."""
    return make_model(folder, template_of(name), FAMILIES[name])


def make_model(folder: Path, template: str = CHATML, family: Family = FAMILIES["qwen2_5"]) -> Path:
    """A folder with tokenizer, settings and template, as `fetch` leaves it (without weights)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _sentencepiece(family) if family.sentencepiece else _byte_level(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": family.eos[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    known: dict[str, object] = {"schema": 1, "eos_ids": [tokenizer.token_to_id(token) for token in family.eos]}
    if family.bos:
        settings["bos_token"] = family.bos
    if family.pad:
        settings["pad_token"] = family.pad
        known["pad_id"] = tokenizer.token_to_id(family.pad)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "hivetune.json").write_text(json.dumps(known))
    return folder


def _texts() -> list[str]:
    """English that no version of Python changes: the topics of its help differ between 3.11.2 and 3.11.7."""
    return LICENCE.read_text(encoding="utf-8").split("\n\n")


def _byte_level(family: Family) -> Tokenizer:
    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.specials])
    return tokenizer


@cache
def _trained() -> str:
    """A byte-level tokenizer without control tokens, as JSON: trained once (0.1 s), completed for each family."""
    tokenizer = Tokenizer(models.BPE())
    # Qwen's and Llama 3's way to cut text: line breaks stay together in front of a word, unlike in GPT-2's.
    cut = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    text: str = tokenizer.to_str()
    return text


def _sentencepiece(family: Family) -> Tokenizer:
    """As Gemma and Mistral: spaces are a letter, unknown characters fall back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=family.specials[0]))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[
            *(AddedToken(token, special=True, normalized=False) for token in family.specials),
            *(f"<0x{byte:02X}>" for byte in range(256)),
        ],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer
