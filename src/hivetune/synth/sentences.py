"""Sentences of documentation: the first ones unchanged, and their content as an imperative."""

import re
from functools import cache
from importlib.resources import files

MAX_TOLD_CHARS = 420
MAX_DEED_CHARS = 150
MIN_SENTENCE_CHARS = 12
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|resp|approx|incl|no|fig|sec|dr|mr|ms|inc|ltd)\.|\b[A-Z]\.)$",
                           re.IGNORECASE)  # fmt: skip
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(`\[#A-Z0-9-])")
# A sentence that refers to another part of the page.
_DANGLING = re.compile(
    r"\b(?:see (?:also )?(?:below|above|the|section)|below|above|following|as follows|this section|previous(?:ly)?"
    r"|earlier|next section|described (?:in|under)|table \d|figure \d|section \d"
    r"|mandatory arguments to|usage \d|has more details|for more (?:details|information))\b|\[\d+\]|-{3}|#{2}|:$",
    re.IGNORECASE,
)
# A first sentence that points at what stood before it, or says what happens without the option (git-pack-refs(1)).
_POINTING = re.compile(
    r"(?:These|Those|Such|Here|Setting these|This list|They|Other|Another)\b|This (?:is|was) (?:also|the same)\b"
    r"|(?:The command )?[Bb]y default\b"
)
_LEAD = re.compile(
    r"^(?:(?:This|The)(?: [\w-]+)? (?:option|flag|switch|command|subcommand|setting|directive)s?"
    r"|This|It|Is used to|Used to|Can be used to|May be used to)\s+(?:(?:is|can be|may be) used to |will |can |may )?",
)
# A reference to another page ends no question.
_SEE = re.compile(r",? \(?see [\w.@-]+\(\d\w*\)\)?$")
# Deeds that say of an argument what it looks like, not what the option does.
_NO_DEED = re.compile(
    r"(?:take|accept|expect|specify|contain|control|be|have|allow|default|refer|mean|may|use|see|require)s? "
    r"(?:an?|one|two|the|either|to|for|this|that|its|whether|how|which|what|multiple|several|same)\b|same as|as above"
    r"|(?:take|accept|expect)s? .*\bas (?:an? |its )?argument"
)
# Behind a word that is verb and noun ("time to wait", "list of files"), these say that it is the noun.
_NOUN_BEFORE = re.compile(
    r"(?:mode|option|value|name)s?\b|(?:to|of|for|in|that|is|are|which|used|between|can|will|must|may|was|has|should)\b"
)
# Behind a word of nouns.txt this says that it is a verb: "time the command", not "time limit of a command".
_DETERMINER = re.compile(
    r"(?:an?|the|all|any|each|every|only|one|both|this|these|no|its|your|up|out|on|into|from)\b", re.I
)
_THIRD = {"does": "do", "has": "have", "goes": "go"}


def sentences(text: str) -> list[str]:
    """Return the sentences of the first paragraphs, in order."""
    whole_sentences: list[str] = []
    for paragraph in text.split("\n\n"):
        pieces = _SENTENCE_END.split(" ".join(paragraph.split()))
        whole = ""
        for piece in pieces:
            whole = f"{whole} {piece}".strip()
            if whole and not _ABBREVIATION.search(whole):
                whole_sentences.append(whole)
                whole = ""
        if whole:
            whole_sentences.append(whole)
        if whole_sentences and (whole_sentences[-1][-1].isalnum() or whole_sentences[-1][-1] in ")'\""):
            whole_sentences[-1] += "."  # a paragraph's end
    return whole_sentences


def excerpt(text: str, longest: int = MAX_TOLD_CHARS) -> str:
    """Return as many first sentences as fit into `longest` characters and can be understood alone, or ""."""
    if _POINTING.match(text.lstrip()):
        return ""
    text_so_far = ""
    for sentence in sentences(text):
        if len(text_so_far) + len(sentence) + 1 > longest or _DANGLING.search(sentence) or not balanced(sentence):
            break
        text_so_far = f"{text_so_far} {sentence}".strip()
    if len(text_so_far) < MIN_SENTENCE_CHARS or not (text_so_far[0].isalnum() or text_so_far[0] in "\"'`(/-$~<."):
        return ""
    return capital(text_so_far if text_so_far[-1] in ".!?" else f"{text_so_far}.")


def balanced(text: str) -> bool:
    """Return whether all brackets are closed; if not, the sentence was cut or read wrongly."""
    return text.count("(") == text.count(")") and text.count('"') % 2 == 0 and text.count("[") == text.count("]")


def capital(text: str) -> str:
    """Return the text with its first letter in upper case, unless the first word is a name such as ssh."""
    first = text.split(" ", 1)[0].rstrip(",")
    return text[:1].upper() + text[1:] if first in word_list("starts") or imperative(first) else text


def action_phrase(text: str) -> str:
    """Return a description as an imperative, such as `show only the unit states`; "" if it begins with no verb."""
    first = next(iter(sentences(text)), "")
    # Behind a semicolon stand defaults and values; a word before it may be a label, as in "Mount point; specify it".
    first = _LEAD.sub("", first.partition(";")[0].strip(), count=1).rstrip(".!").strip()
    first = _SEE.sub("", first)
    if len(first) > MAX_DEED_CHARS or len(first) < MIN_SENTENCE_CHARS or _DANGLING.search(first) or not balanced(first):
        return ""
    word, _, rest = first.partition(" ")
    base = imperative(word)
    if not base or len(rest.split()) < 2 or _NOUN_BEFORE.match(rest) or f"{base} {rest}".startswith("do not "):
        return ""  # "how can I do not print"
    if base in word_list("nouns") and not _DETERMINER.match(rest):
        return ""
    return "" if _NO_DEED.match(f"{base} {rest}") else f"{base} {rest}"


def imperative(word: str) -> str:
    """Return the base form of a verb with which a description begins; "" for any other word."""
    plain = word.lower()
    if not plain.isalpha():
        return ""
    verbs = word_list("verbs")
    if plain in verbs:
        return plain
    if plain in _THIRD:
        return _THIRD[plain]
    for ending, instead in (("ies", "y"), ("es", ""), ("s", "")):
        if plain.endswith(ending) and (base := plain.removesuffix(ending) + instead) in verbs:
            return base
    return ""


@cache
def word_list(name: str) -> frozenset[str]:
    """Return the words of words/NAME.txt."""
    return frozenset((files(__package__) / "words" / f"{name}.txt").read_text(encoding="utf-8").split())
