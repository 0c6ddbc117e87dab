"""The tokens of a text from those of its words are the tokens of the text, whatever stands in it."""

from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hivetune.data.render import borders
from hivetune.data.render.borders import _PATTERNS, WordTokens, can_be_cut

TEXTS = [topics[name] for name in sorted(topics)[:20]]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
STEPS: dict[str, Any] = {
    "GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "SmolLM": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
for number, pattern in enumerate(sorted(_PATTERNS)):
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    STEPS[f"pattern {number}"] = pre_tokenizers.Sequence([split, BYTES])


def trained(steps: Any, *added: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = steps, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_end|>", *added)])
    return tokenizer


KNOWN = {name: trained(steps) for name, steps in STEPS.items()}
WORDS = st.sampled_from(
    [
        *(
            "the",
            "it's",
            "IT'S",
            " ",
            "  ",
            "\n",
            "\t",
            "\r\n",
            "\n\n",
            "\x85",
            "\u3000",
            "\x1c",
            "1234",
            "5",
            "\u00e9",
            "e\u0301",
        ),
        *("\u4f60\u597d", "\U0001f642", "<|im_end|>", "...", "'", "/", "-", "\u200d", "_", "$", "\u180e", "\u2028"),
    ]
)


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.one_of(WORDS, st.text(max_size=4)), max_size=24))
def test_the_tokens_of_a_text_are_those_of_its_words(name: str, parts: list[str]) -> None:
    tokenizer, text = KNOWN[name], "".join(parts).encode("utf-8", "ignore").decode()
    assert can_be_cut(tokenizer)
    assert WordTokens(tokenizer).tokens_of(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_words_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borders, "MAX_REMEMBERED", 50)
    tokenizer = KNOWN["SmolLM"]
    known = WordTokens(tokenizer)
    for text in TEXTS[:3]:
        for line in (text, text[:200]):
            assert known.tokens_of(line) == tokenizer.encode(line, add_special_tokens=False).ids


def test_a_word_without_tokens_is_remembered_too() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "\u0120a": 1, "\u0120": 2}, merges=[("\u0120", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    known = WordTokens(tokenizer)
    for text in ("b", "a b a", "b\n\nb a", "\n", "a"):
        for _ in range(2):
            assert known.tokens_of(text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "tokenizer",
    [
        trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        trained(BYTES),  # no pattern: a token may hold several words
        trained(pre_tokenizers.Metaspace()),
        trained(STEPS["GPT-2"], "<|tool call|>"),  # cut in two
    ],
)
def test_other_tokenizers_get_the_whole_text(tokenizer: Tokenizer) -> None:
    assert not can_be_cut(tokenizer)
    assert WordTokens(tokenizer).tokens_of(TEXTS[0]) == tokenizer.encode(TEXTS[0], add_special_tokens=False).ids
