"""What the other columns of a row are: facts and notes about it, media, or content that a layout has to explain.

A row is read only if each part of it that looks like content is found again in its conversation. Names decide first,
since a name means the same in every row of a file; a value is looked at only under a name that nobody knows.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from hivetune.data.pieces.fields import (
    AGENT,
    CATEGORY,
    FEEDBACK,
    NESTED,
    OWN_ID,
    SESSION,
    SUCCESS,
    TIME,
    USER,
    plain_name,
)
from hivetune.data.pieces.said import Conversation, Row, RowLayout, first_of, names, parsed, texts_in
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

Kind = Literal["note", "media", "content", "choice", "unknown"]

SYSTEM = ("system", "system_prompt", "system_message", "system_content", "sys_prompt", "meta_instruction")
TOOLS = ("tools", "functions", "available_tools", "tool_definitions")
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "user_prompt", "user_message", "user_input")
MORE_PROMPTS = ("human", "request", "message", "user_query", "user_request", "input", "inputs", "user", "ask", "q")
ASKED = (*PROMPTS, *MORE_PROMPTS)
ANSWERS = ("completion", "response", "output", "answer", "outputs", "target", "targets", "solution", "reply")
MORE_ANSWERS = ("assistant", "assistant_response", "ai_response", "bot_response", "model_response", "llm_response")
OTHER_ANSWERS = ("sql", "model_output", "generated_text", "generation", "expected_output", "bot", "ai", "gpt", "a")
# Of evaluation sets, and of preference sets without their worse answer. Beside a list of turns they are for checking.
EXPECTED = ("actual_output", "expected", "expected_answer", "expected_response", "reference_answer", "model_answer")
BETTER = ("chosen", "chosen_response", "preferred")
REPLIES = (*ANSWERS, *MORE_ANSWERS, *OTHER_ANSWERS)
ANSWERED = (*REPLIES, *EXPECTED, *BETTER)
CONTEXT = ("context", "passage", "background", "document", "paragraph")
THOUGHTS = (
    "reasoning",
    "reasoning_content",
    "thinking",
    "think",
    "thought",
    "thoughts",
    "cot",
    "complex_cot",
    "chain_of_thought",
)
TURNS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns", "history", "chat_history")
FACTS = (*SESSION, *USER, *AGENT, *CATEGORY, *TIME, *SUCCESS, *FEEDBACK, *OWN_ID, *NESTED)

MEDIA = names(
    "image_id image_ids image_name imagename img_id img_name img_path "
    "image images image_url image_urls image_path image_paths image_file img photo picture pictures audio audios "
    "audio_path audio_url speech music video videos video_path video_url pdf pixel_values"
)
CONTENT = frozenset(
    (*SYSTEM, *ASKED, *ANSWERED, *CONTEXT, *THOUGHTS, *TURNS, "command", "tool_used", "text", "content", "answers")
) | names(
    "documents passages contexts choices options candidates article articles abstract body code chunks "
    "retrieved_documents retrieved_context rationale explanation explanations hint hints steps examples demonstrations "
    "persona knowledge facts evidence summary highlights translation definition premise hypothesis schema sql role "
    "label_text story dialogue_history best_answer correct_answer incorrect_answers rejected "
    "rejected_response responses completions generations answers_list tool_calls tools_called "
    "called_tools expected_tools function_calls retrieval_context"
)
NOTES = frozenset(FACTS) | names(
    "source sources url urls link dataset dataset_name data_source origin untrusted checker lang language languages "
    "locale model models model_name engine provider generator teacher split subset config name title author authors "
    "license licence version revision tags tag keywords labels_source hash sha256 md5 idx index row number order "
    "turn turns_count num_turns level difficulty complexity quality grade path file filename file_name file_path "
    "filepath repo repository dump date_published published updated updated_at modified duration latency cost usage "
    "token_count tokens n_tokens finish_reason stop_reason status status_code error_code country state city region "
    "ip hashed_ip header headers user_agent toxic toxicity redacted moderation openai_moderation "
    "detoxify_moderation annotation annotations annotator annotators annotation_type reward_model parameters "
    "params temperature max_tokens top_p top_k stop seed stream environment env release host hostname pid thread "
    "instruct_reward gen_input_config pre_query_template input_generator conversation_hash avatar_url views "
    "skip_prompt_formatting trace span parent kind event level_name logger severity program benchmark contamination "
    "parent_run extra info prompt_name template task_name custom_id object system_fingerprint service_tier weight "
    "weights loss enable_thinking reasoning_effort tool_choice parallel_tool_calls response_format logprobs "
    "answered_by client rejected_answer latency_s subject synth type"
)
# Beside another answer that does not say the same, that is the answer of a system under test.
_TRUE_ANSWERS = names(
    "target gold gold_answer golden_answer ground_truth groundtruth gt expected_answer correct_answer"
)
_NO_INPUT = ("noinput", "no input", "n/a", "none", "null", "nan", "no input required", "no input needed")
_NOTE_ENDS = tuple(
    names(
        "_id _ids _uuid _url _uri _hash _at _time _date _timestamp _score _scores _count _counts _length _len _tokens "
        "_type _name _lang _language _model _source _version _explanation _config _params _rating _reward _quality "
        "_status _path _file _index _idx _ms _seconds _cost _reason _category _probability _logprobs _ppl _flag"
    )
)
_NOTE_STARTS = tuple(names("num_ is_ has_ n_ original_ raw_ gen_ meta_ metadata_ original source_ __"))

_WRITTEN_AS = ("json", "str", "list", "raw", "dict")  # how a table keeps it: `sources_json` are sources
# Words that choose among things known before, where one word stands; more words are what was said to the model.
_CHOSEN = names("persona story scenario knowledge profile mode style tone")

CHOICE = re.compile(r"\A(?:(?:option|opt|op|choice|answer_option|answer)_?)?([a-j])\Z")  # one of several, by its letter
NUMBERED_CHOICE = re.compile(r"\A(?:option|opt|choice|ending|sol)_?(\d)\Z")  # or by its number
_NAMED_DOCUMENT = re.compile(r"(?=\S*[A-Za-z])(?=\S*[\d_./:#-])[\w./:#@%+-]+", re.ASCII)
MIN_WORDS = 3
MIN_WIDE_CHARS = 8  # Chinese and Japanese write without spaces
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def plain_row(row: Row) -> Row:
    """`row` with names in lower case and snake_case: `systemPrompt`, "System Prompt" and `system_prompt` are one.

    A name that would be there twice stays as it is.
    """
    renamed = _plain_names(tuple(row))
    return row if renamed is None else dict(zip(renamed, row.values(), strict=True))


@lru_cache(512)
def _plain_names(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """The plain name of each column; None when all are plain already."""
    plain: list[str] = []
    for name in names:
        new = plain_name(name)
        plain.append(name if new in plain or (new != name and new in names) else new)
    return None if tuple(plain) == names else tuple(plain)


def is_content(key: str, value: Any) -> bool:
    """Whether a column would have to be explained by a layout."""
    kind = column_kind(plain_name(key))
    return kind in ("content", "media") or (kind == "unknown" and looks_like_content(value))


@lru_cache(4096)
def column_kind(name: str) -> Kind:
    """What the name of a column says."""
    if name in MEDIA:
        return "media"
    if (name in CONTENT or name in TOOLS) and name != "user":  # mostly who asked, not what
        return "content"
    if CHOICE.match(name) or NUMBERED_CHOICE.match(name):
        return "content"  # one word may be a choice, without which the answer "B" means nothing
    if name in NOTES or name.endswith(_NOTE_ENDS) or name.startswith(_NOTE_STARTS):
        return "note"
    written_as = name.rpartition("_")
    return column_kind(written_as[0]) if written_as[0] and written_as[2] in _WRITTEN_AS else "unknown"


def numbers_of(row: Row) -> dict[int, str]:
    """The columns of choices by the numbers in their names."""
    return {int(match.group(1)): name for name in row if (match := NUMBERED_CHOICE.match(plain_name(name)))}


def unexplained(row: Row, layout: RowLayout, conversation: Conversation) -> str | None:
    """The first column that looks like content and is not found in the conversation. Raises RowRefused for media."""
    for name, kind in _looked_at(tuple(row), layout):
        value = row[name]
        nothing: tuple[Any, ...] = (
            (None, "") if name in layout.asks else (None, "", [], {})
        )  # no part of this text may have a label
        if name in conversation.explained or value in nothing or _is_choice(name, value):
            continue
        if kind == "media":
            raise RowRefused("unsupported-content", f"the column {name[:40]}: only text can be learned")
        if _is_lost(name, kind, value, conversation):
            return name
        if name in layout.asks or (kind in ("content", "choice") and layout.asks):
            return name  # a document beside a question, an answer or a label is half of something
        if kind == "unknown" and not looks_like_content(value):
            continue
        if not _is_found(value, kind in ("content", "choice"), conversation.messages):
            return name
    return None


def _is_lost(name: str, kind: Kind, value: Any, conversation: Conversation) -> bool:
    """Whether a choice is not named, or what was expected is not the answer: then a system under test gave that, and
    may have used the same words.
    """
    if name == "expected" and isinstance(value, str):
        return not _is_said(value, conversation)
    if name in _TRUE_ANSWERS and isinstance(value, str | int | float) and not isinstance(value, bool):
        return not _stands_in_answer(str(value).strip(), conversation)
    return kind == "choice" and _is_lost_choice(name, value, conversation)


def _stands_in_answer(value: str, conversation: Conversation) -> bool:
    """Whether the last answer says this among other words."""
    answers = [message.content for message in conversation.messages if message.role == "assistant"]
    return bool(answers) and (not value or stands_in(value.lower(), answers[-1].lower()))


def stands_in(short: str, long: str) -> bool:
    """Whether a text stands in a longer one, and is no piece of a word or a number there."""
    return bool(short) and short in long and _with_borders(short) in _with_borders(long)


def _with_borders(text: str) -> str:
    """`text` with a sign wherever a word may begin or end, so that one search in proportion to the text finds all."""
    return re.sub("(?<![\\w.\ufdd1])", "\ufdd0", re.sub(r"(?!\w)", "\ufdd1", text))


def _is_said(value: str, conversation: Conversation) -> bool:
    """Whether a message says this and nothing else."""
    return any(message.content.strip() == value.strip() for message in conversation.messages)


def _is_lost_choice(name: str, value: Any, conversation: Conversation) -> bool:
    """Whether the question does not name one of several choices by its letter: its words may stand there by chance."""
    named = re.compile(rf"(?<!\w){name[-1]}\W{{1,3}}{re.escape(str(value).strip()[:200])}", re.I)
    return not any(named.search(message.content) for message in conversation.messages if message.role == "user")


def _is_choice(name: str, value: Any) -> bool:
    """Whether a value only chooses among things that were known before, or says that there is no input."""
    if name == "input":
        return says_none(value)
    return name in _CHOSEN and isinstance(value, str) and value.isidentifier()


@lru_cache(512)
def _looked_at(names: tuple[str, ...], layout: RowLayout) -> tuple[tuple[str, Kind], ...]:
    """The columns of such rows that may be content, by what their names say."""
    kinds = ((name, column_kind(name)) for name in names if name not in layout.explains)
    choices = {name for name in names if CHOICE.match(name) and name[:-1] + "a" in names and name[:-1] + "b" in names}
    return tuple(
        (name, "choice" if name in choices else kind)
        for name, kind in kinds
        if name in layout.asks or (kind != "note" and (kind == "media" or name not in layout.beside))
    )


def looks_like_content(value: Any) -> bool:
    """Whether somebody wrote this: at least three words, or as many signs of a script without spaces."""
    return any(_is_prose(text) for text in texts_in(value))


def _is_prose(text: str) -> bool:
    if text.startswith("data:image/"):
        return True
    words = text.split(None, MIN_WORDS)
    return (len(words) >= MIN_WORDS and any(c.isalpha() for c in text[:200])) or (
        not text.isascii() and len(_WIDE.findall(text)) >= MIN_WIDE_CHARS
    )


def says_none(value: Any) -> bool:
    """Whether somebody wrote that an instruction has no input."""
    return isinstance(value, str) and value.strip().lower().strip("<>[]() .") in _NO_INPUT


def names_document(text: str) -> bool:
    """Whether a text only names a document that stands elsewhere: `page_12`, `guides/returns.txt`."""
    return _NAMED_DOCUMENT.fullmatch(text.strip()) is not None


def _is_found(value: Any, named: bool, messages: Sequence[Message]) -> bool:
    """Whether all prose of `value` (all its texts, if its name says content) stands in the conversation, or the
    conversation in it: a column that holds the whole row as one text adds nothing.
    """
    if isinstance(value, str) and any(value in message.content for message in messages):
        return True  # the usual case
    if isinstance(value, str):
        inside = parsed(value)
        value = value if isinstance(inside, str) else inside
    texts = [text.strip() for text in texts_in(value) if (named and text.strip()) or _is_prose(text)]
    if not texts:
        return True  # numbers: nothing that anybody said
    said = [message.content for message in messages]
    if isinstance(value, str) and all(line.strip() in value for piece in said for line in piece.split("\n")):
        return True  # a template may have left out what was thought
    whole = "\n".join((*said, *(message.reasoning for message in messages if message.reasoning)))
    return all(text in whole for text in texts)


def system_of(row: Row) -> Any:
    """The system prompt in its own column."""
    name = first_of(row, SYSTEM)
    return row[name] if name else None


def tools_of(row: Row) -> Any:
    name = first_of(row, TOOLS)
    return row[name] if name else None


def thoughts_of(row: Row) -> str | None:
    """What was thought before the answer, in a column of its own."""
    name = first_of(row, THOUGHTS)
    value = row[name] if name else None
    return value if isinstance(value, str) and value.strip() else None
