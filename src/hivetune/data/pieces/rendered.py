"""A prompt that a chat template has already written, back to its turns: ChatML, Llama 3, Gemma, Mistral and Llama 2."""

import re
from dataclasses import replace

from hivetune.data.pieces.said import Conversation

# BlueLM and Baize: `[|Human|]:`; InternLM and MOSS: `<|User|>:`.
_ZEPHYR = r"<\|(system|user|human|prompter|assistant|ai|bot)\|>"
_PIPED = r"[\[<]\|(Human|User|AI|Assistant|Bot|System)\|[\]>]"
_MARKS = {
    "chatml": re.compile(r"<\|im_start\|>(\w+)\n(.*?)(<\|im_end\|>|\Z)", re.S),
    "llama3": re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*(.*?)(<\|eot_id\|>|\Z)", re.S),
    "zephyr": re.compile(rf"{_ZEPHYR}(.*?)()(?={_ZEPHYR.replace('(', '(?:')}|\Z)", re.S),
    "piped": re.compile(rf"{_PIPED} ?[:\uff1a]? ?(.*?)((?:<eo[ahm]>\s*)?)(?={_PIPED.replace('(', '(?:')}|\Z)", re.S),
    "telechat": re.compile(r"<_(user|bot)>(.*?)()(?=<_(?:user|bot)>|\Z)", re.S),
    "gemma": re.compile(r"<start_of_turn>(\w+)\n(.*?)(<end_of_turn>|\Z)", re.S),
    "deepseek": re.compile(
        r"<\uff5c(User|Assistant)\uff5c>(.*?)((?:<\uff5cend\u2581of\u2581sentence\uff5c>)?)(?=<\uff5c(?:User|Assistant)\uff5c>|\Z)",
        re.S,
    ),
    "baichuan": re.compile(r"<reserved_(10[2367])>(.*?)((?:</s>)?)(?=<reserved_10[2367]>|\Z)", re.S),
}
_RESERVED = {"102": "user", "103": "assistant", "106": "user", "107": "assistant"}
_BARE_SYSTEM = ("piped", "deepseek", "baichuan")  # templates in which a system prompt stands bare in front
_ANSWER = ("assistant", "model", "ai", "bot")
_ZEPHYR_ENDS = ("<|eos|>", "<|eod|>", "<|end|>", "<|endoftext|>", "</s>")
_ANY = re.compile(
    r"<\|\w+\|>|<\uff5c\w+\uff5c>|<reserved_10\d>|\[\|(?:Human|User|AI|Assistant|Bot|System)\|\]|<_(?:user|bot)>|<start_of_turn>|<end_of_turn>|\[/?INST\]|<<SYS>>"
)
_NO_THOUGHTS = re.compile(r"\A\s*(?:<think>\s*(?:</think>\s*)?)?\Z")
_LLAMA_DATES = re.compile(r"\ACutting Knowledge Date: [^\n]*\nToday Date: [^\n]*\n*")
_SPEAKERS = {"human": "user", "user": "user", "system": "system"}  # all others answer
_NAMES = r"(Human|HUMAN|User|USER|Assistant|ASSISTANT|GPT|System|SYSTEM) ?: ?"
_LINE = r"(?:\A|\n)[ \t]*"
_BEGINS_SPEAKER = re.compile(r"\s*(<s>\s*|### ?|)" + _NAMES)
_SPEAKER = r"(?:### ?)?<?(Human|User|USER|user|Assistant|ASSISTANT|assistant|GPT|bot|Bot|System|SYSTEM|system)>? ?: ?"
_ASKER = re.compile(r"\s*" + _SPEAKER)
_INLINE = re.compile(r"(?:\A|\s)" + _SPEAKER)
_IN_CHINESE = re.compile(r"\A\s*(?:<s>\s*)?(?:\[Round \d+\]\s*)?问[:：](.*?)答[:：](.*)\Z", re.S)
_NEXT_ROUND = re.compile(r"(?=\[Round \d+\]\s*问[:：])")
_NEXT_TURN = re.compile(r"^[^\S\n]*### ?(?:Human|User|Assistant|Instruction|Input) ?:|\[\|(?:Human|User)\|\]", re.M)
_INSTRUCTION = re.compile(r"^### ?Instruction:", re.M)
_RESPONSE = re.compile(r"^### ?(?:Response|Output|Answer):", re.M)
_HEADER_CHARS = 40  # in which a header begins
_QUESTION_HEADER = re.compile(r"\A(?:\s{0,20}### ?(?:Instruction|Human|User|Question) ?:){1,4}\s*")
_ANSWER_BEGINS = re.compile(r"### ?(?:Response|Assistant|Answer|Output) ?:?\s*\Z")
_ANSWER_HEADER = re.compile(
    r"\A(?:\s{0,20}(?:### ?(?:Response|Assistant|Answer) ?:|\[\|(?:AI|Assistant|Bot)\|\] ?[:\uff1a]?)){1,4}\s*"
)
_END = re.compile(
    r"(<\|(?:endoftext|im_end|eot_id|end_of_text|end)\|>|</s>|<eos>|<end_of_turn>|<eo[ahm]>|<\uff5cend\u2581of\u2581sentence\uff5c>)\s*\Z"
)
_BEGINS = r"\s|<s>|<bos>|<\|begin_of_text\|>|<\uff5cbegin\u2581of\u2581sentence\uff5c>"
_MARK_IN_FRONT = re.compile(rf"\A(?:{_BEGINS})*")
_FRAME = re.compile(rf"\A(?:{_BEGINS}|</s>|<\|endoftext\|>)*\Z")


def turns_of(prompt: str, *, whole: bool = False) -> list[dict[str, str]] | None:
    """Return the turns of a prompt, without the header of the answer at its end; `whole`: with the answer, whose end
    may have no mark. None: not one of these templates, or text stands between its marks.
    """
    if "<" not in prompt and "[" not in prompt:
        return None  # nearly every text: the patterns would take most of its time
    for kind, pattern in _MARKS.items():
        if marks := list(pattern.finditer(prompt)):
            return _marked_turns(prompt, kind, marks, whole=whole)
    return _turns_of_llama_2(prompt) if "[INST]" in prompt else None


def _turns_of_llama_2(prompt: str) -> list[dict[str, str]] | None:
    """Return the turns of a prompt of Mistral's or Llama 2's template."""
    before, *rounds = prompt.split("[INST]")
    turns = []
    for turn in rounds:
        user_text, mark, rest = turn.partition("[/INST]")
        answer, end, behind = rest.partition("</s>")
        if not mark or not _FRAME.match(before) or not _FRAME.match(end + behind):
            return None
        user_text = user_text.lstrip()
        system, mark, question = user_text.removeprefix("<<SYS>>\n").partition("\n<</SYS>>\n\n")
        if mark and user_text.startswith("<<SYS>>\n"):
            turns += [{"role": "system", "content": system}] if system else []
            user_text = question
        turns += [{"role": "user", "content": user_text.rstrip()}, {"role": "assistant", "content": answer.strip()}]
    return _clean(turns)


def _marked_turns(prompt: str, kind: str, marks: list[re.Match[str]], *, whole: bool) -> list[dict[str, str]] | None:
    """Return the turns of a prompt of the template `kind`, whose pieces were found."""
    before = prompt[: marks[0].start()]
    system = _MARK_IN_FRONT.sub("", before).strip() if kind in _BARE_SYSTEM else ""  # a system prompt that stands bare
    if not _FRAME.match(_MARKS[kind].sub("", prompt[len(before) :] if system else prompt)):
        return None
    turns = [{"role": "system", "content": system}] if system else []
    rest = ""
    for match in marks:
        role, text, rest = match.group(1).lower(), match.group(2), match.group(3)
        if kind == "zephyr":  # its words end before white space and marks of the end
            end = len(text.rstrip())
            while mark := next((mark for mark in _ZEPHYR_ENDS if text.endswith(mark, 0, end)), None):
                end = len(text[: end - len(mark)].rstrip())
            text, rest = text[:end].lstrip(), text[end:].strip()
        turns.append({"role": _RESERVED.get(role, role), "content": text if kind == "zephyr" else text.strip("\n")})
    is_open = not rest and turns[-1]["role"] in _ANSWER
    if is_open and not whole and not _NO_THOUGHTS.match(turns[-1]["content"]):
        return None  # the answer's beginning was given
    return _clean(turns[:-1] if is_open and not whole else turns)


def _take_turns(roles: list[str], sides: tuple[str, str] = ("user", "assistant")) -> bool:
    """Return whether two sides speak in turn, after a system prompt or without one."""
    return all(role == sides[i % 2] for i, role in enumerate(roles[1:] if roles[0] == "system" else roles))


def spoken_turns(text: str) -> list[dict[str, str]] | None:
    """Return the turns of a text that begins with a speaker and has another one: `### Human: ..`, `USER: .. ASSISTANT:
    ..`.

    None when it begins otherwise or only one side speaks: a document. Empty when the speakers do not take turns, so
    that a line of somebody's text may look like a speaker.
    """
    first = _BEGINS_SPEAKER.match(text)
    if first is None:
        return None
    lead = first.group(1)
    border = r"<s>\s*" if lead.startswith("<s>") else r"### ?" if lead else _LINE
    pieces = re.split(border + _NAMES, text.lstrip())[1:]
    roles = [_SPEAKERS.get(name.lower(), "assistant") for name in pieces[::2]]
    if not {"user", "assistant"} <= set(roles):
        return None
    texts = [without_end(piece.strip(), "").strip() for piece in pieces[1::2]]
    # Who plays a part may speak first: the question of the first answer stands elsewhere.
    plays = (roles[0] == "assistant" and bool(lead)) or roles[:2] == ["system", "assistant"]
    in_turn = _take_turns(roles, ("assistant", "user") if plays else ("user", "assistant"))
    if not in_turn or any(_ANY.search(piece) for piece in texts):
        return []
    return [{"role": role, "content": piece} for role, piece in zip(roles, texts, strict=True)]


def prompt_turns(prompt: str) -> list[dict[str, str]] | None:
    """Return the turns of a prompt in which speakers take turns up to a question: "Human: .. Assistant: .. Human: ..",
    maybe with the speaker of the answer at its end.

    None for any other text. Empty when the speakers do not take turns or the answer has begun.
    """
    if "\u95ee" in prompt and (rounds := _rounds_in_chinese(prompt)) is not None:  # 问
        return rounds
    if not _ASKER.match(prompt):
        before, mark, rest = prompt.partition("### Human:")
        if not mark or not prompt.rstrip().endswith("### Assistant:"):
            return None
        turns = prompt_turns(mark + rest)
        return turns and [{"role": "system", "content": before.strip()}, *turns]
    pieces = _INLINE.split(prompt)[1:]
    roles = [_SPEAKERS.get(name.lower(), "assistant") for name in pieces[::2]]
    texts = [piece.strip() for piece in pieces[1::2]]
    if not {"user", "assistant"} <= set(roles):
        return None
    if roles[-1] == "assistant" and not texts[-1]:
        roles, texts = roles[:-1], texts[:-1]
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return turns if roles[-1] == "user" and _take_turns(roles) else []


def _rounds_in_chinese(prompt: str) -> list[dict[str, str]] | None:
    """Return the turns of ChatGLM's prompts, which end where the answer begins."""
    pieces = [piece for piece in _NEXT_ROUND.split(prompt) if piece.strip()]
    rounds = [_IN_CHINESE.match(piece) for piece in pieces]
    texts = [match.group(i).strip() for match in rounds if match is not None for i in (1, 2)]
    if len(texts) < 2 * len(pieces) or not texts or texts[-1] or not all(texts[:-1]):
        return None
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts[:-1])]


def goes_on(answer: str) -> bool:
    """Return whether an answer continues with further turns, as of a model that does not stop."""
    return _NEXT_TURN.search(answer) is not None


def without_header(text: str, *, answer: bool) -> str:
    """Return a question or an answer without the header that a template (Alpaca's, BlueLM's) writes before it."""
    head = text[:_HEADER_CHARS]
    if not answer and "###" in head and _QUESTION_HEADER.match(text) and (begun := _ANSWER_BEGINS.search(text)):
        text = text[: begun.start()].rstrip()
    return (_ANSWER_HEADER if answer else _QUESTION_HEADER).sub("", text) if "###" in head or "[|" in head else text


def without_end(answer: str, question: str) -> str:
    """Return an answer without another model's end mark. The mark stays if the question has it too, or if it closes a
    tag.
    """
    mark = _end_mark(answer)
    if mark is None or mark in question or (mark == "</s>" and "<s>" in answer):
        return answer
    return answer.rstrip().removesuffix(mark).rstrip()


def _end_mark(answer: str) -> str | None:
    match = _END.search(answer, max(0, len(answer) - _HEADER_CHARS)) if answer.rstrip().endswith(">") else None
    return match.group(1) if match else None


def without_ends(conversation: Conversation) -> Conversation:
    """Return a conversation without the mark at the end of its answer, and of other turns that end so. It stays where a
    text has it elsewhere too.
    """
    mark = _end_mark(conversation.messages[-1].content)
    if mark is None:
        return conversation
    texts = [message.content.rstrip() for message in conversation.messages]
    bare = [text.removesuffix(mark).rstrip() if text.endswith(mark) else text for text in texts]
    if any(mark in text or (mark == "</s>" and "<s>" in text) for text in bare):
        return conversation
    read = zip(conversation.messages, texts, bare, strict=True)
    messages = tuple(m if text == rest else replace(m, content=rest) for m, text, rest in read)
    return conversation._replace(messages=messages, changed=(*conversation.changed, "turns-from-text"))


def is_marked(text: str) -> bool:
    """Return whether a text holds marks that only a template writes."""
    return ("<" in text or "[" in text) and _ANY.search(text) is not None


def is_rendered(text: str) -> bool:
    """Return whether a text holds the marks or headers of a template, so that learning it whole would teach the
    questions too.
    """
    if is_marked(text):
        return True
    header = _INSTRUCTION.search(text)
    return header is not None and _RESPONSE.search(text, header.end()) is not None


def _clean(turns: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """Return the turns without the templates' own text. None if a mark is left in a text."""
    if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        turns = turns[:-1]
    if turns and turns[0]["role"] == "system":
        turns[0]["content"] = _LLAMA_DATES.sub("", turns[0]["content"])
        turns = turns if turns[0]["content"].strip() else turns[1:]
    return None if not turns or any(_ANY.search(turn["content"]) for turn in turns) else turns
