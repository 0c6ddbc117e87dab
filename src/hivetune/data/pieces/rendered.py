"""Text that a program wrote around the words: turns in exact ChatML and Llama 3, thoughts before an answer, HTML.

A text with the markers of any other template is refused, because training on it would train on the questions too.
"""

import html
import re
from dataclasses import replace

from hivetune.records import Message

_CHATML = re.compile(r"<\|im_start\|>(system|user|assistant|tool)\n(.*?)(<\|im_end\|>\s*|\Z)", re.S)
_LLAMA_3 = re.compile(
    r"<\|start_header_id\|>(system|user|assistant|tool|ipython)<\|end_header_id\|>\n\n(.*?)(<\|eot_id\|>|\Z)", re.S
)
_BEGIN = re.compile(r"\A\s*(?:<\|begin_of_text\|>|<s>|<bos>)?\s*")
_MARK = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|begin_of_text|user|assistant|system|end)\|>"
    r"|<start_of_turn>|<end_of_turn>|\[/?INST\]|<<SYS>>|<\uff5c(?:User|Assistant)\uff5c>|<turn\|>|<\|turn>"
)
_DATES = re.compile(r"\ACutting Knowledge Date: [^\n]*\nToday Date: [^\n]*\n*")  # Llama 3.1's own words
_CLOSED = re.compile(r"\A(?P<thought>.*?)\n</think>[ \t]*\n\s*(?P<answer>.*)\Z", re.S)
# As Open WebUI shows thoughts above an answer.
_DETAILS = re.compile(
    r"\A\s*<details type=\"reasoning\"[^>]*>\s*+(?:<summary>.*?</summary>)?+(?P<thought>.*?)</details>"
    r"\s*(?P<answer>.*)\Z",
    re.S,
)


def rendered_turns(text: str, *, whole: bool) -> list[dict[str, str]] | None:
    """Return the turns of a rendered conversation; None for any other text. `whole`: the text contains the answer;
    otherwise it is a prompt, which may end with the header of the answer."""
    if "<|" not in text:
        return None
    body = text[_BEGIN.match(text).end() :]  # type: ignore[union-attr]  # it matches every text
    for pattern in (_CHATML, _LLAMA_3):
        matches = list(pattern.finditer(body))
        if not matches or "".join(match.group() for match in matches).strip() != body.strip():
            continue  # text between the turns: a template that we do not know exactly
        turns = [{"role": match[1].replace("ipython", "tool"), "content": match[2].strip("\n")} for match in matches]
        if not matches[-1][3] and turns[-1]["role"] == "assistant" and not (whole and turns[-1]["content"]):
            if turns[-1]["content"]:
                return None  # a prompt that begins the answer
            turns.pop()
        if turns and turns[0]["role"] == "system":
            turns[0]["content"] = _DATES.sub("", turns[0]["content"])
            turns = turns if turns[0]["content"].strip() else turns[1:]
        return turns if turns and not any(map(has_marks, (turn["content"] for turn in turns))) else None
    return None


def has_marks(text: str) -> bool:
    """Return whether a text contains markers that only chat templates write, such as <|im_start|>."""
    return ("<" in text or "[" in text) and _MARK.search(text) is not None


def with_thoughts_apart(message: Message) -> Message:
    """Return an answer with the thoughts at its beginning moved to their own field: thoughts that end with `</think>`
    on a line of its own, or that a chat page shows folded. Any other message is returned unchanged."""
    text = message.content
    if message.role != "assistant" or message.reasoning or "<think>" in text:
        return message
    if "\n</think>" in text and (match := _CLOSED.match(text)):
        return replace(message, content=match["answer"], reasoning=match["thought"])
    if '<details type="reasoning"' in text and (match := _DETAILS.match(text)):
        lines = [line.removeprefix(">").removeprefix(" ") for line in match["thought"].strip().split("\n")]
        return replace(message, content=match["answer"], reasoning="\n".join(lines).strip())
    return message


_MARKUP = re.compile(r"</?(?:p|div|br|b|i|a|ul|ol|li|span|strong|em|img|h[1-6]|blockquote|pre|code)\b[^<>]*>", re.I)
_BREAK = re.compile(r"<(?:br\b[^<>]*|(?:/p|/div|/li|/h[1-6]|/blockquote|/pre)\s*/?)>", re.I)


def without_markup(body: str) -> str:
    """Return the visible text of a message's HTML; in text without tags only entities are decoded."""
    text = _MARKUP.sub("", _BREAK.sub("\n", body)) if _MARKUP.search(body) else body
    lines = (" ".join(line.split()) for line in html.unescape(text).strip().split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
