"""A tiny random model with a tokenizer of its own: real code, no download."""

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, trainers

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Not our own files: a word changed in one of them would change the tokens, and with them what random weights say.
CORPUS = [topics[name] for name in sorted(topics)[:6]]
SPACE = "\u2581"
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


def tokenizer_for(vocab_size: int = 900) -> Tokenizer:
    """A small one of SentencePiece's kind: llama.cpp's script reads its pieces, whatever they are. Of byte-level
    tokenizers it knows published vocabularies alone."""
    text, normalizer = [*CORPUS, *[*NASTY] * 5], normalizers.Replace(" ", SPACE)
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


def write_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = tokenizer_for()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return tokenizer


def write_model(folder: Path, family: str = "llama") -> Any:
    """A prepared folder with a small random Llama; returns the transformers module (float32)."""
    import torch
    import transformers

    from hivetune.models.worker.linears import count_sizes

    tokenizer = write_tokenizer(folder)
    end = tokenizer.token_to_id("<|im_end|>")
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 5,  # embeddings are often padded
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,  # large enough that a wrong rotation or norm shows
        eos_token_id=end,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    described = {"schema": 1, "name": family, "kind": "folder", "source": family, "revision": None}
    described |= {"eos_ids": [end], "pad_id": 0, "bos_id": None, "sizes": count_sizes(model)}
    (folder / "hivetune.json").write_text(json.dumps(described))
    (folder / "manifest.json").write_text("{}")
    return model
