"""The ids that are put together from pieces are those that the tokenizer makes of the whole text."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from data.models import LICENCE
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from hivetune.data.render.renderer import SPLITTERS, TextEncoder, as_ids

LLAMA3, QWEN = SPLITTERS
PLAIN = ("<|im_start|>", "<|im_end|>")
# Normalizer, splitters, what the control tokens take beside them, and whether its words are kept.
KINDS: Mapping[str, Sequence[Any]] = {
    "gpt2": (None, [pre_tokenizers.ByteLevel(add_prefix_space=False)], {}, True),
    "smollm2": (None, [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)], {}, True),
    "llama3": (None, [LLAMA3], {}, True),
    "qwen": (normalizers.NFC(), [QWEN], {}, True),
    "another pattern": (None, [r"\S+\s?|\s+"], {}, False),
    "no splitter of words": (None, [], {}, False),
    "compatible letters": (normalizers.NFKC(), [QWEN], {}, False),
    "tokens that take the space behind them": (None, [LLAMA3], {"rstrip": True}, False),
    "tokens that take the space before them": (None, [LLAMA3], {"lstrip": True}, False),
    "tokens that stand alone": (None, [LLAMA3], {"single_word": True}, False),
    "spaces are a letter": (None, [pre_tokenizers.Metaspace(prepend_scheme="first")], {}, False),
    "a space in front": (None, [pre_tokenizers.ByteLevel(add_prefix_space=True)], {}, False),
}
PIECES = (
    " ",
    "  ",
    "\n",
    "\t",
    " \n",
    "\r\n",
    "the",
    " of",
    "License",
    "'s",
    " 's",
    "5",
    " 2024",
    "é",
    "e\u0301",
    " \u0301",
    "👋",
)
TEXTS = st.lists(
    st.one_of(st.sampled_from((*PIECES, *PLAIN, "<|im", "\0", "\u3000")), st.text(max_size=6)), max_size=14
).map("".join)


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Tokenizer, TextEncoder]]:
    return {kind: _made(*settings[:3]) for kind, settings in KINDS.items()}


def _made(normalizer: Any, splitters: Sequence[Any], beside: Mapping[str, bool]) -> tuple[Tokenizer, TextEncoder]:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    steps = [pre_tokenizers.Split(Regex(one), "isolated") if isinstance(one, str) else one for one in splitters]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, letters])
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LICENCE.read_text(encoding="utf-8").split("\n\n"), trainer)
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False, **beside) for one in PLAIN])
    return tokenizer, TextEncoder(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, place=st.integers(0, 60))
def test_pieces_make_the_ids_of_the_whole(
    kind: str, made: dict[str, tuple[Tokenizer, TextEncoder]], text: str, place: int
) -> None:
    tokenizer, encoder = made[kind]
    whole: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    encoded = encoder.encode(text)
    assert list(as_ids(encoded.ids)) == whole
    head: list[int] = tokenizer.encode(text[:place], add_special_tokens=False).ids
    assert encoder.tokens_before(encoded, min(place, len(text))) == (len(head) if whole[: len(head)] == head else None)


def test_words_are_kept_where_the_tokenizer_splits_at_spaces(made: dict[str, tuple[Tokenizer, TextEncoder]]) -> None:
    for kind, (*_, has_words) in KINDS.items():
        _, encoder = made[kind]
        encoder.encode("<|im_start|>rights are granted now<|im_end|>\n")
        assert (" granted" in encoder._words) == has_words, kind
