"""The search for placeholders: answers such as `TBD`, `#REF!`, `n/a`, `[deleted]` or an API's error message.

Only a whole answer is a placeholder. It is a real answer if the prompt names it ("reply N/A if ..."), or if it may be
the name of a class and many rows of the file share few answers.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from hivetune.data.pieces.said import names, parsed
from hivetune.data.reasons import RowRefused
from hivetune.records import Message

# Longer answers are no placeholders, except for pages, streams and dummy text.
MAX_CHARS = 400
# Placeholders that may also be names of classes.
_MAY_BE_LABELS = names("none null nil nan n/a na - -- ? empty void 无 なし") | {"not applicable", "not available"}
_WORDS = names(
    "tbd tba tbc todo fixme wip ditto dito idem undefined placeholder xxx xxxx ... .. . … — – ?? ??? --- ____ k.a. "
    "s.o. 同上 待定 暂无 未定 [deleted] [removed] [redacted] (empty) [empty] (null) <null> (none) [blank] (blank) nan% "
    "<na> {} [] () <unk>"
) | {
    *("see above", "see below", "see previous answer", "same as above", "as above", "to be done", "to be determined"),
    *("to be announced", "to be confirmed", "to do", "not yet answered", "no answer yet", "answer pending", "pending"),
    *("coming soon", "work in progress", "siehe oben", "siehe unten", "keine angabe", "folgt", "voir ci-dessus"),
    *("ver arriba", "véase arriba", "vedi sopra", "zie boven", "como acima", "à compléter", "[object object]"),
    *("[removed by reddit]", "[ removed by reddit ]", "[deleted by user]", "this message was deleted"),
    *("you deleted this message", "message deleted", "<media omitted>", "image omitted", "[no answer]", "(no answer)"),
    *("[response cleared]", "[assistant message]"),
}
# Error values of spreadsheets in several languages: #REF!, #BEZUG!, #¿NOMBRE?, #N/A, #NV.
_SHEET = re.compile(r"#(?:[^\W\d_a-z¿¡]|[/0¿¡]){1,12}[!?]|#(?:N/?A|N/D|NV|NUL|ND)")
_SLOT = re.compile(
    r"[<\[({$%]{1,3}\s?(?:\w+[ -]){0,4}(?:\w+_)?"
    r"(?:answer|response|reply|completion|output|solution|placeholder|insert|your)"
    r"(?:_\w+)?(?:[ -]\w+){0,4}\s?[>\])}%]{1,3}"
)
# Text to be replaced later: `Dummy summary`, `TODO: add it`, `your answer here`, `to be filled in`.
_THING = (
    r"(?:answer|response|reply|completion|output|solution|summary|translation|text|content|description|explanation)"
)
_UNFILLED = re.compile(
    r"(?:this is )?(?:an? |the |some |my )?(?:just )?(?:an? )?(?:dummy|placeholder|sample|mock)"
    rf" (?:\w+ ){{0,2}}{_THING}(?: (?:\d{{1,4}}|[a-z]))?(?: for .{{1,80}})?"
    rf"|(?:your|insert|put|add|write|enter|type|fill in|replace with)(?: [\w']+){{0,3}} {_THING}(?: goes| text)? here"
    rf"|(?:the |an? )?{_THING} (?:(?:goes|comes|will be) )?here"
    r"|(?:todo|fixme|tbd) ?[:(\u2013-].{0,120}"
    r"|fill (?:me|this|it) in"
    r"|to be (?:filled|added|written|completed|provided|decided|inserted)(?: in)?(?: later| soon)?"
)
_TELLS_UNFILLED = re.compile(
    r"dummy|placeholder|sample|mock|todo|fixme|tbd|fill|here"
)  # words that the prompt may name
# The name of the field, as in a header among the rows. A class may have such a name too.
_NAMED = re.compile(
    r"(?:expected|example|test|assistant|bot|model|chatbot|reference|target|desired|ideal|ground truth)"
    r" (?:answer|response|reply|completion|output|summary|translation|solution)(?: ?#?\d{1,4})?"
)
# The raw events of a stream.
_STREAM_HEADS = ("event:", "data:")
_STREAM = re.compile(r"(?:event: ?[\w.]+\s+)?data: ?\{\s*\"")
# The name or maker of a model that introduces itself, not filled in. Other templates in an answer are code.
_UNNAMED_SPEAKER = re.compile(r"\{\{ ?(?:name|author) ?\}\}", re.I)
_OF_TEMPLATES = re.compile(r"\{\{|template|jinja|mustache|handlebars|liquid|angular|vue|placeholder|variable", re.I)
# An open slot in a question: `for my [pump or valve].`, `to [name of town]?`. One of these words alone is what a log's
# owner put in the place of personal data or of inaudible words.
_OF_PERSONS = "name|city|town|country|location|place|address|email|phone|company|school|person|date|number|redacted"
_OPEN_PLACE = re.compile(
    r"\b(?:an?|my|your|our|to|of|for|with|about|from|in|at) "
    rf"(\[(?!(?:{_OF_PERSONS}|removed|hidden|deleted|inaudible)\])[a-z]{{4,}}(?:[ /_-][a-z0-9]+){{0,3}}\])(?=[.?!,]|\Z)"
)
_OF_BRACKETS = re.compile(
    r"[`\"\n]|brackets?|fill|blank|mask|slot|letter|mail|draft|message|section|config|toml|syntax|array|regex|\btags?\b",
    re.I,
)
_MAX_OPEN_CHARS = 200  # a longer question may quote a template
_LABELLED = re.compile(r"([^\W\d_][\w /-]{0,40})[:\uff1a](.*)")
_MIN_LABELLED_LINES = 3
_BRACKETS = "[]<>(){}*#%$ .!\u2026"
_ERROR_TEXT = re.compile(
    r"(?:(?:api ?|server ?|request )?error(?: code)?:? ?-? ?)?(?:http ?)?(?:(?:4[0-9]{2}|5[0-9]{2})[ :,-]+)?"
    r"(?:rate[ _]limit(?: exceeded| reached| error)?|ratelimiterror|too many requests|request time(?:d )?-? ?out"
    r"|time-?out(?: error)?|internal server error|bad gateway|service (?:temporarily )?unavailable|gateway time-?out"
    r"|unauthorized|connection (?:error|refused|reset|timed out)|insufficient[ _]quota|quota exceeded"
    r"|overloaded(?:_error)?"
    r"|invalid api key|max retries exceeded|model (?:is )?overloaded|no response from (?:the )?(?:model|server|api))"
    r"[.!]{0,3}(?: please (?:try|wait)[^.]{0,80}[.!]?)?"
)
# The status of an error: `API Error: 429`, `HTTP 503`, `Request failed with code 500`.
_ERROR_STATUS = re.compile(
    r"(?:(?:api|llm|model|upstream|provider) (?:call )?error\b(?: http| status)?(?: code)?"
    r"[ :(\[-]*[45][0-9]{2}\b.{0,200}"
    r"|(?:(?:http|server|client|request|network) )?(?:error|request failed|failed)"
    r"(?: with)?(?: http)?(?: status)?(?: code)?[ :(\[-]+[45][0-9]{2}[\])]?"
    r"|http (?:status )?(?:code )?[45][0-9]{2})[.! ]*",
    re.S,
)
_ERROR_START = re.compile(
    r"(?:sorry,? )?(?:i|we) (?:encountered|ran into) an? (?:\w+ )?error\b.{0,120}\Z"
    r"|(?:sorry,? )?something went wrong\b.{0,120}\Z|an (?:\w+ )?error (?:has )?occurred\b.{0,120}\Z"
    r"|error: .{0,200}\Z|traceback \(most recent call last\): .*\w(?:error|exception)(?:: [^:]{0,120})?\Z"
    r"|error code: [45][0-9]{2}\b|rate limit (?:exceeded|reached) (?:for|on|in)\b"
    r"|you exceeded your current quota\b|this model's maximum context length is\b"
    r"|the server is (?:currently )?overloaded\b"
    r"|(?:openai|anthropic)\.[a-z.]*error\b|<!doctype html>.{0,200}<title>\s*[45][0-9]{2}\b",
    re.S,
)
# What a chat shows instead of an answer. The question may still be about errors, such as one about code.
_TRY_AGAIN = re.compile(
    r"(?:oops[!,.]* |(?:i'm )?sorry[,.]? (?:but )?)?(?:something went wrong|an (?:\w+ )?error (?:has )?occurred)"
    r"(?: while \w+ your (?:request|message))?[,.!:;-]* ?(?:please )?"
    r"try again(?: later| in a (?:moment|few minutes))?[.!]*"
)
_MAX_RETRY_CHARS = 200
# A link to a picture and nothing else.
_PICTURE = re.compile(r"(?:!\[[^\]\n]*\]\()?https?://[^\s()]+\.(?:png|jpe?g|webp|gif)(?:\?[^\s()]*)?\)?", re.I)
_ABOUT_LINKS = re.compile(r"https?://|\b(?:ur[li]s?|links?|urls)\b|!\[", re.I)
# A program reports that no answer was made. "No answer was found" may be an answer.
_NOT_MADE = re.compile(
    r"(?:sorry,? )?(?:no|empty) (?:answer|response|reply|output|completion|content) (?:was |has been |could be )?"
    r"(?:generated|received|returned|produced|given by the model|from (?:the )?(?:llm|model|server|api))"
    r"|(?:failed|unable) to (?:generate|produce|get) (?:an? |any )?(?:answer|response|reply|output)"
    r"|(?:pas de|aucune) réponse (?:n'a (?:été|pu être) )?(?:générée|reçue|produite)"
    r"|keine antwort (?:wurde )?(?:generiert|erzeugt|erhalten|empfangen)"
    r"|(?:no se (?:generó|recibió|ha generado) (?:ninguna |una )?respuesta|(?:sin|ninguna) respuesta generada)"
    r"|(?:nenhuma resposta (?:foi )?(?:gerada|recebida)|sem resposta gerada|não foi gerada (?:nenhuma )?resposta)"
    r"|nessuna risposta (?:è stata )?(?:generata|ricevuta)|geen antwoord (?:gegenereerd|ontvangen)"
    r"|(?:nie wygenerowano|brak wygenerowanej) odpowiedzi|ответ не (?:был )?(?:сгенерирован|получен)"
    r"|(?:未|没有|沒有)(?:能)?(?:生成|收到|返回)(?:任何)?(?:回答|回复|回覆|答案|响应|內容|内容)"
    r"|(?:回答|応答|返答)(?:が|は)(?:生成されませんでした|ありませんでした)|응답이 생성되지 않았습니다"
)
# A program reports that the model is unavailable. People say the same of a telephone, so the patterns are long.
_NO_MODEL = re.compile(
    r"(?:(?:sorry|i'm sorry|we're sorry|apologies|unfortunately)[,.]? (?:but )?)?(?:the|our|my) (?:\w+ ){0,2}"
    r"(?:language model|llm|ai (?:model|service|assistant)|model|chat ?bot) is (?:currently |temporarily )?"
    r"(?:not (?:currently )?(?:available|loaded|reachable)|unavailable|offline|overloaded)"
    r"(?: right now| at the moment)?[.!,;].*"
    r"|(?:извините|простите|к сожалению)[,.]? (?:\w+ ){0,2}модель (?:сейчас |временно |пока )?"
    r"(?:недоступна|не загружена|не отвечает)[.!,;].*"
    r"|(?:entschuldigung|leider|tut mir leid)[,.]? (?:ist )?das (?:\w+[ -]){0,2}?(?:sprach|ki-)?modell (?:ist )?"
    r"(?:derzeit |zurzeit |momentan )?(?:nicht (?:verfügbar|erreichbar|geladen)|überlastet)[.!,;].*"
    r"|(?:désolée?|malheureusement)[,.]? le modèle (?:\w+ ){0,2}?(?:est (?:actuellement |temporairement )?"
    r"(?:indisponible|hors ligne)|n'est pas (?:actuellement )?disponible)[.!,;].*"
    r"|(?:lo siento|lo sentimos|disculpe?)[,.]? el modelo (?:\w+ ){0,2}?no está disponible\b.*"
    r"|(?:desculpe|lamento|infelizmente)[,.]? o modelo (?:\w+ ){0,2}?(?:não está disponível|está indisponível)\b.*"
    r"|(?:spiacente|mi dispiace|purtroppo)[,.]? il modello (?:\w+ ){0,2}?non è (?:\w+ )?disponibile\b.*"
    r"|(?:很?抱歉|对不起|對不起)[，,]?\s?\w{0,4}模型(?:暂时|目前|当前|現在|现在)?(?:不可用|无法使用|未加载|不可使用).*",
    re.S,
)
_MODEL = re.compile(r"model|модел|modèle|模型", re.I)
# A stop token, the end mark of a template, or a note that text was omitted, and nothing else.
_MARK = re.compile(
    r"#{3,}|={3,}|\*{3,}|-{3,}|~{3,}|</?s>|\[/?inst\]"
    r"|[\[<(](?:[\w-]+ ){0,3}(?:trimmed|truncated|omitted|elided|snipped|redacted|removed)(?: [\w-]+){0,4}[\])>]"
    r"|<\|?(?:im_(?:start|end|sep)|end_?of_?text|eot(?:_id)?|end_of_turn|end|eos|eod|pad|bos|stop|assistant|user)\|?>"
)
_SIGNS = "❌❗‼⚠🚫⛔✖✗\ufe0f "  # before a message of a program
_ERROR_KEYS = names("error message code status status_code type param detail details request_id success ok statuscode")
_ABOUT_ERRORS = re.compile(r"error|status|http|exception|\bapi\b|fehler", re.I)

MIN_LABELLED = 10  # fewer rows are no evidence
ROWS_PER_LABEL = 3  # minimum, on average
SHORT_SHARE = 0.9
_LABEL_CHARS, _LABEL_WORDS = 40, 4


class Placeholder(NamedTuple):
    """A placeholder; `may_be_label` says whether it could be the name of a class."""

    shown: str
    may_be_label: bool


def refuse_placeholder(messages: Sequence[Message], few_labels: Callable[[], bool]) -> tuple[str, ...]:
    """Return the warnings of a row, or raise RowRefused("placeholder-answer").

    `few_labels` returns whether many rows of the file share few answers; it is called only when that matters.
    """
    kept: tuple[str, ...] = ()
    for number, message in enumerate(messages):
        if message.role != "assistant" or not message.weight or message.tool_calls:
            continue
        if (left := _never_filled_in(message.content, messages[:number])) is not None:
            raise RowRefused("placeholder-answer", f"{left} was never filled in")
        placeholder = placeholder_in(message.content, [m.content for m in messages[:number] if m.role != "tool"])
        if placeholder is None:
            continue
        if not (placeholder.may_be_label and few_labels()):
            where = f" of message {number + 1}" if number + 1 < len(messages) else ""
            raise RowRefused("placeholder-answer", f"{placeholder.shown!r} stands in the place of the answer{where}")
        kept = ("label-answer",)
    return kept


def _never_filled_in(answer: str, before: Sequence[Message]) -> str | None:
    """Return the part of a template that is left in an answer or its question, or None."""
    if _has_unnamed_speaker(answer, before):
        return "{{name}} or {{author}} in the answer"
    asked = before[-1].content if before and before[-1].role == "user" else ""
    may_be_open = "[" in asked and len(asked) <= _MAX_OPEN_CHARS
    if may_be_open and (slot := _OPEN_PLACE.search(asked)) and not _OF_BRACKETS.search(asked):
        return f"{slot.group(1)} in the question"
    return "most of the form in the answer" if _is_empty_form(answer, before) else None


def _is_empty_form(answer: str, before: Sequence[Message]) -> bool:
    """Return whether an answer is lines with labels, most without a value, and the prompt names none of the labels."""
    if len(answer) > MAX_CHARS or not (":\n" in answer or ": \n" in answer):
        return False
    lines = [_LABELLED.fullmatch(line.rstrip()) for line in answer.splitlines() if line.strip()]
    labelled = [line for line in lines if line is not None]
    empty = [line.group(1) for line in labelled if not line.group(2).strip()]
    if len(labelled) < max(len(lines), _MIN_LABELLED_LINES) or 2 * len(empty) <= len(labelled):
        return False
    return not any(_is_named(label, [message.content for message in before]) for label in empty)


def _has_unnamed_speaker(answer: str, before: Sequence[Message]) -> bool:
    """Return whether a slot for the speaker or its maker was never filled in."""
    if "{{" not in answer or "{%" in answer or "```" in answer or "<" in answer or not _UNNAMED_SPEAKER.search(answer):
        return False
    return not any(_OF_TEMPLATES.search(message.content) for message in before)


def placeholder_in(answer: str, before: Iterable[str]) -> Placeholder | None:
    """Return the placeholder that an answer is, or None. `before` has the texts of the prompt."""
    text = answer.strip()
    if _is_shown_instead(text, before):
        return Placeholder(text[:40], False)
    if len(text) > MAX_CHARS and not text[:40].lower().startswith(("lorem ipsum", "<!doctype html", *_STREAM_HEADS)):
        return None
    plain = " ".join(text.casefold().split())
    plain = plain.lstrip(_SIGNS) or plain
    shown = text[:40]
    bare = plain.rstrip(".!") or plain
    if plain in _MAY_BE_LABELS or bare in _MAY_BE_LABELS:
        return None if _is_named(bare, before) else Placeholder(shown, True)
    if (may_be_label := _left_to_fill(plain, before)) is not None:
        return Placeholder(shown, may_be_label)
    if _is_missing(text, plain):
        return None if _is_named(bare.split(" dolor")[0], before) else Placeholder(shown, False)
    if _NO_MODEL.fullmatch(plain):
        return None if any(_MODEL.search(one) for one in list(before)[-1:]) else Placeholder(shown, False)
    return Placeholder(shown, False) if _is_error(text, plain, before) else None


def _is_shown_instead(text: str, before: Iterable[str]) -> bool:
    """Return whether a chat showed a text instead of an answer: a picture, or that something went wrong."""
    if text.startswith(("http", "![")) and _PICTURE.fullmatch(text):
        return not any(map(_ABOUT_LINKS.search, before))
    tries = len(text) <= _MAX_RETRY_CHARS and _TRY_AGAIN.fullmatch(" ".join(text.casefold().split()))
    return bool(tries) and not any("try again" in one.casefold() for one in before)


def _left_to_fill(plain: str, before: Iterable[str]) -> bool | None:
    """Return None for an answer; for a text to be replaced later, return whether it may be the name of a class."""
    text = plain.strip(_BRACKETS).replace("_", " ")
    is_name = _NAMED.fullmatch(text) is not None
    if not is_name and not _UNFILLED.fullmatch(text):
        return None
    word = None if is_name else _TELLS_UNFILLED.search(text)
    return None if _is_named(word.group() if word else text, before) else is_name


def _is_missing(text: str, plain: str) -> bool:
    """Return whether an answer says that there is none, or is to be filled in."""
    if (
        {plain, plain.rstrip(".!")} & _WORDS
        or plain.startswith("lorem ipsum")
        or _NOT_MADE.fullmatch(plain.rstrip(".!。 "))
    ):
        return True
    if _MARK.fullmatch(plain) or _STREAM.match(text):
        return True
    return bool(_SHEET.fullmatch(text) or _SLOT.fullmatch(plain))


def _is_named(word: str, before: Iterable[str]) -> bool:
    """Return whether the prompt names the answer. Signs must be in quotes, since most questions have some."""
    is_word = any(c.isalnum() for c in word)
    pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)" if is_word else rf"[\"'`“]{re.escape(word)}[\"'`”]", re.I)
    return any(pattern.search(text) for text in before)


def _is_error(text: str, plain: str, before: Iterable[str]) -> bool:
    """Return whether an answer is the error message of an API, and the prompt is not about errors."""
    message = _ERROR_TEXT.fullmatch(plain) or _ERROR_STATUS.fullmatch(plain) or _ERROR_START.match(plain)
    # The prompt last: searching it takes five times as long as everything else here.
    return bool(message or _is_error_object(parsed(text))) and not any(_ABOUT_ERRORS.search(one) for one in before)


def _is_error_object(value: Any) -> bool:
    return isinstance(value, dict) and bool(value.get("error")) and {str(key).lower() for key in value} <= _ERROR_KEYS


def share_few_labels(answers: Collection[str]) -> bool:
    """Return whether the answers of a file are classes: short, and each of many rows. Placeholders don't count."""
    texts = [answer.strip().casefold() for answer in answers if placeholder_in(answer, ()) is None]
    short = [text for text in texts if len(text) <= _LABEL_CHARS and len(text.split()) <= _LABEL_WORDS]
    if len(texts) < MIN_LABELLED or len(short) < SHORT_SHARE * len(texts):
        return False
    return len(Counter(short)) > 1 and len(Counter(short)) * ROWS_PER_LABEL <= len(short)
