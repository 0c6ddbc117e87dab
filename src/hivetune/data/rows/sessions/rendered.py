"""A prompt that a chat template has already written, back to its turns: ChatML, Llama 3, Gemma, Mistral and Llama 2."""

import re

_MARKS = {
    "chatml": re.compile(r"<\|im_start\|>(\w+)\n(.*?)(<\|im_end\|>|\Z)", re.S),
    "llama3": re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(<\|eot_id\|>|\Z)", re.S),
    "gemma": re.compile(r"<start_of_turn>(\w+)\n(.*?)(<end_of_turn>|\Z)", re.S),
}
_INST = re.compile(r"\[INST\]\s*(?:<<SYS>>\n(.*?)\n<</SYS>>\n\n)?(.*?)\s*\[/INST\](.*?)(?=</s>|\[INST\]|\Z)", re.S)
_ANY = re.compile(r"<\|\w+\|>|<start_of_turn>|<end_of_turn>|\[/?INST\]|<<SYS>>")
_NO_THOUGHTS = re.compile(r"\A\s*(?:<think>\s*(?:</think>)?\s*)?\Z")
_LLAMA_DATES = re.compile(r"\ACutting Knowledge Date: [^\n]*\nToday Date: [^\n]*\n*")
_FRAME = re.compile(r"\A(?:\s|<s>|</s>|<bos>|<\|begin_of_text\|>|<\|endoftext\|>)*\Z")


def turns_of(prompt: str) -> list[dict[str, str]] | None:
    """The turns of a prompt, without the header of the answer at its end. None: not one of these templates, or text
    stands between its marks.
    """
    for pattern in _MARKS.values():
        found = list(pattern.finditer(prompt))
        if found:
            if not _FRAME.match(pattern.sub("", prompt)):
                return None
            turns = [{"role": m.group(1), "content": m.group(2).strip("\n")} for m in found]
            is_open = found[-1].group(3) == "" and turns[-1]["role"] in ("assistant", "model")
            if is_open and not _NO_THOUGHTS.match(turns[-1]["content"]):
                return None  # the answer's beginning was given
            return _clean(turns[:-1] if is_open else turns)
    if "[INST]" in prompt:
        turns = []
        for m in _INST.finditer(prompt):
            if m.group(1):
                turns.append({"role": "system", "content": m.group(1)})
            turns += [{"role": "user", "content": m.group(2)}, {"role": "assistant", "content": m.group(3).strip()}]
        return _clean(turns) if _FRAME.match(_INST.sub("", prompt)) else None
    return None


def _clean(turns: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """Without what the templates add of themselves. None when a mark is left in a text."""
    if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        turns = turns[:-1]
    if turns and turns[0]["role"] == "system":
        turns[0]["content"] = _LLAMA_DATES.sub("", turns[0]["content"])
        turns = turns if turns[0]["content"].strip() else turns[1:]
    return None if not turns or any(_ANY.search(turn["content"]) for turn in turns) else turns
