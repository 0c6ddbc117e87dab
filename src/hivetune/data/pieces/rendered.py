"""A conversation that a chat template has written, back to its turns: exact ChatML and Llama 3.

A text with the marks of any other template is refused, because learning it whole would teach the questions too.
"""

import re

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


def rendered_turns(text: str, *, whole: bool) -> list[dict[str, str]] | None:
    """Return the turns of a rendered conversation; None for any other text. `whole`: the answer is a part of it, else
    it is a prompt, whose last header may open the answer.
    """
    if "<|" not in text:
        return None
    body = text[_BEGIN.match(text).end() :]  # type: ignore[union-attr]  # it matches every text
    for pattern in (_CHATML, _LLAMA_3):
        matches = list(pattern.finditer(body))
        if not matches or "".join(match.group() for match in matches).strip() != body.strip():
            continue
        turns = [{"role": match[1], "content": match[2].strip("\n")} for match in matches]
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
    """Return whether a text holds marks that only a template writes."""
    return ("<" in text or "[" in text) and _MARK.search(text) is not None
