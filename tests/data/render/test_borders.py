"""Control tokens tell the same tokens and masks as offsets of characters do."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hivetune.data.render.borders import Borders

CONTROLS = ("<|im_start|>", "<|im_end|>")
PIECES = st.sampled_from(["a", "b", " ", "\n", "ab", "é", "assistant\n", "<|im_", "im_end|>", *CONTROLS])


def byte_tokenizer(**added: bool) -> Tokenizer:
    """Bytes, and a few merges over borders that a template's header has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ċ", "a"), ("ab", "ab")]
    words = {word: i for i, word in enumerate([*alphabet, *(one + two for one, two in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, **added) for token in CONTROLS])
    return tokenizer


TOKENIZER = byte_tokenizer()


def alone(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def by_offsets(text: str, start: int, end: int) -> tuple[int, int] | None:
    """The slow way: None where the first character is no border of tokens."""
    encoding = TOKENIZER.encode(text, add_special_tokens=False)
    first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
    span = None if first is None else encoding.token_to_chars(first)
    if first is None or last is None or span is None or span[0] < start:
        return None
    return first, last


@given(st.lists(PIECES, max_size=8), st.lists(PIECES, min_size=1, max_size=8), st.lists(PIECES, max_size=4))
def test_what_is_told_is_what_offsets_say(before: Sequence[str], answer: Sequence[str], behind: Sequence[str]) -> None:
    prompt = f"{''.join(before)}{CONTROLS[0]}assistant\n"
    text = f"{prompt}{''.join(answer)}{CONTROLS[1]}"
    span = (len(prompt), len(text))
    told = Borders(TOKENIZER, CONTROLS, alone).tokens_of(text + "".join(behind), [span])
    if told is not None:
        assert told[0] == alone(text + "".join(behind))
        assert told[1] == [by_offsets(text + "".join(behind), *span)]


def test_an_answer_that_melts_with_its_header_is_not_told() -> None:
    prompt = f"{CONTROLS[0]}assistant\n"
    borders = Borders(TOKENIZER, CONTROLS, alone)
    for answer, is_told in (("b", True), ("a", False)):  # the line break and an "a" are one token
        text = f"{prompt}{answer}{CONTROLS[1]}"
        assert (borders.tokens_of(text, [(len(prompt), len(text))]) is not None) is is_told


def test_tokens_that_take_white_space_along_are_left_to_offsets() -> None:
    assert Borders(TOKENIZER, CONTROLS, alone).can_tell
    assert not Borders(byte_tokenizer(rstrip=True), CONTROLS, alone).can_tell
