"""Tiny random models with tokenizers of their own, one per architecture that is exported: real code, no download."""

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hivetune.models.prepared import SCHEMA

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Not our own files: a word changed in one of them would change the tokens, and with them what random weights say.
CORPUS = [topics[name] for name in sorted(topics)[:6]]
SPACE = "\u2581"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
# The rules as published tokenizers write them: a pattern, ("digits", singly), ("bytes", with GPT-2's pattern).
PRE_TOKENIZERS: dict[str, tuple[tuple[str, Any], ...]] = {
    "gpt-2": (("bytes", True),),
    "smollm": (("digits", True), ("bytes", True)),
    "llama-bpe": (("split", rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}"), ("bytes", False)),
    "qwen2": (("split", rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{_TAIL}"), ("bytes", False)),
    "tekken": (
        ("split", rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}{_TAIL_SLASH}"),
        ("bytes", False),
    ),
    "gpt-4o": (
        (
            "split",
            rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
            rf"|\p{{N}}{{1,3}}{_TAIL_SLASH}",
        ),
        ("bytes", False),
    ),
}

# family: (architecture in transformers, splitting rule, settings besides the common ones)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "smollm", {"tie_word_embeddings": True}),
    "llama3": (
        "Llama",
        "llama-bpe",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": ("Mistral", "tekken", {"sliding_window": None}),
    "qwen2": ("Qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "qwen2", {"head_dim": 32}),
    "gemma": ("Gemma", "sentencepiece", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2",
        "sentencepiece",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64, "num_hidden_layers": 4},
    ),
    "gemma3": (
        "Gemma3Text",
        "sentencepiece",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64, "num_hidden_layers": 6},
    ),
    "phi3": ("Phi3", "sentencepiece-prefix", {"sliding_window": None}),
    "phi4": ("Phi3", "gpt-4o", {"sliding_window": None}),
    "qwen3moe": (
        "Qwen3Moe",
        "qwen2",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", "tekken", {"num_local_experts": 4, "sliding_window": None}),
    "olmoe": ("Olmoe", "gpt-2", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "gpt2-rule": ("Llama", "gpt-2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
}
NASTY = (
    "Hello world, it's 12345.678 and they'LL see 1,000,000 of 3.14159!",
    "  two  spaces\n\n\nthree newlines\r\n\ttabs\t\t and trailing   ",
    "naïve café Ωμέγα привет 你好，世界 こんにちは 안녕 مرحبا १२३ ½ Ⅷ",
    "emoji 👩‍👩‍👧‍👦🏽 é (combining) \u00a0nbsp\u200bzero\ufeff",
    "def f(x: int) -> str:\n    return f'{x!r}'  # don't\n",
    'a/b//c\\d__e--f==g!!?? <div class="x">&amp;</div> https://x.y/z?q=1&r=2#s',
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
    " ",
    "\n",
    "'s 'S I'M we'RE",
    "x" * 300,
)


def tokenizer_for(rule: str, vocab_size: int = 900) -> Tokenizer:
    text = [*CORPUS, *[*NASTY] * 5]
    if rule.startswith("sentencepiece"):
        return _sentencepiece(text, vocab_size, prefix=rule.endswith("prefix"))
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    steps = [_step(kind, value) for kind, value in PRE_TOKENIZERS[rule]]
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=SPECIALS)
    )
    return tokenizer


def _step(kind: str, value: Any) -> Any:
    if kind == "bytes":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=value)
    if kind == "digits":
        return pre_tokenizers.Digits(individual_digits=value)
    return pre_tokenizers.Split(Regex(value), behavior="isolated")


def _sentencepiece(text: list[str], vocab_size: int, *, prefix: bool) -> Tokenizer:
    """BPE with byte fallback, as SentencePiece models become in `tokenizers`: Gemma's way, or with Llama 2's prefix."""
    normalizer: Any = normalizers.Replace(" ", SPACE)
    if prefix:
        normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizer])
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizer
    learner.train_from_iterator(text[:-20], trainers.BpeTrainer(vocab_size=vocab_size - 300, max_token_length=16))
    learned = json.loads(learner.to_str())["model"]
    vocab = {"<unk>": 0, **{special: i + 1 for i, special in enumerate(SPECIALS)}}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    for piece in learned["vocab"]:
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def write_tokenizer(folder: Path, rule: str) -> Tokenizer:
    tokenizer = tokenizer_for(rule)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return tokenizer


def write_model(folder: Path, family: str) -> Any:
    """A prepared folder with a random model; returns the transformers module (float32)."""
    import torch
    import transformers

    from hivetune.models.worker.linears import count_sizes

    name, rule, extra = FAMILIES[family]
    tokenizer = write_tokenizer(folder, rule)
    end = tokenizer.token_to_id("<|im_end|>")
    common = {
        "vocab_size": tokenizer.get_vocab_size() + 5,  # embeddings are often padded
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,  # large enough that a wrong rotation or norm shows
        "eos_token_id": end,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{name}Config")(**{**common, **extra})
    torch.manual_seed(7)
    prefix = name.removesuffix("Text")
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    described = {
        "schema": SCHEMA,
        "name": family,
        "kind": "folder",
        "source": family,
        "revision": None,
        "eos_ids": [end],
        "pad_id": 0,
        "bos_id": None,
        "template_sha256": "",
        "sizes": count_sizes(model),
    }
    (folder / "hivetune.json").write_text(json.dumps(described))
    (folder / "manifest.json").write_text("{}")
    return model
