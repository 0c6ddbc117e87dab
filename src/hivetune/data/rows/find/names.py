"""What a name says about its value, word by word: who speaks, what was asked, what was answered, what stands beside."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import OF_TWO_ANSWERS, names
from hivetune.data.pieces.turns import ROLES
from hivetune.data.rows.find.languages import in_english
from hivetune.data.rows.layouts.columns import CONTEXT, SYSTEM, THOUGHTS, TOOLS, column_kind, names_document
from hivetune.records import Role

NamePart = Literal[
    "asked", "answered", "system", "thoughts", "tools", "given", "about", "media", "note", "content", "unknown"
]

ASKERS = names(
    "user usr human customer client student patient caller visitor guest buyer prompter inquirer requester asker "
    "apprentice seeker learner consumer shopper traveler traveller 用户 客户 顾客 患者 病人 求助者 来访者 咨询者"
)
ANSWERERS = names(
    "assistant asst ai bot chatbot gpt chatgpt llm model agent support operator advisor adviser tutor teacher doctor "
    "therapist counselor counsellor wizard expert clerk helper librarian representative rep claude gemini copilot "
    "listener supporter salesman salesperson seller nurse physician clinician pharmacist receptionist "
    "助手 客服 医生 支持者 咨询师 心理咨询师 机器人"
)
_MACHINES = names("tool function observation environment ipython execution")
PARTIES: dict[str, Role] = (
    dict.fromkeys(ASKERS, "user")  # type: ignore[assignment]
    | dict.fromkeys(ANSWERERS, "assistant")
    | dict.fromkeys(_MACHINES, "tool")
    | {"system": "system", "sys": "system", "developer": "system"}
    | ROLES
)
_ASKED = names(
    "q question query prompt instruction request problem inquiry enquiry ask queries questions prompts definition "
    "issue ticket complaint"
)
_ANSWERED = names(
    "a label target truth gold golden answer response reply completion output solution generation resolution "
    "continuation"
)
_QUESTIONS = names("question query prompt instruction input problem utterance puzzle riddle")
# Beside a question, what was asked for under the name of its kind: `sql`, `reference_code`, `fulfilment`.
_MADE = names(
    "sql code program patch proof summary highlights tldr headline translation fulfilment fulfillment cypher sparql "
    "bash regex fix diagnosis advice recommendation final"
)
SHORTENED = names(
    "summary summaries highlights tldr headline headlines"
)  # of the only other text, whatever that is called
_QUESTION = names("question query")
_SINGULARS = names("input message utterance label truth target question query prompt request problem answer") | names(
    "response reply completion output solution generation turn"
)
_SYSTEM_SAYS = names("response reply answer utterance output")  # a dialogue system's words
_TELLS_SYSTEM = names("prompt message instruction instructions")
_SAID = names("input message messages text msg utterance content turn said body transcript statement")
# Of one row only one question and one answer is learned; these words name others, or what somebody thinks of them.
_OTHER = names(
    "wrong rejected incorrect bad negative distractor alternative other previous prior old draft judge judgement "
    "critique eval feedback grade grader grading annotator annotation score rubric reason reasons "
    "follow followup next suggested similar related paraphrase rewritten rephrased original translated translation "
    "second third baseline reject history examples example shot template edited revised corrected"
)
# What whoever answered had beside the question, and what was written when the answer was there.
_GIVEN = names(
    "context contexts passage passages background document documents paragraph paragraphs article articles story "
    "schema option options choice choices candidates persona knowledge premise table chapter excerpt abstract "
    "retrieved retrieval scenario hint hints facts evidence evidences rule rules policy policies guideline guidelines "
    "constraint constraints requirement requirements profile puzzle"
)
_THOUGHT = names("reasoning thinking thought thoughts cot think")
_OF_THOUGHTS = names("trace traces trajectory process chain of text content model llm deepseek gemini expected full")
_SETTINGS = names("scenario persona story profile")  # one word there chooses among things known before
_DOCUMENTS = names("context contexts passage passages document documents evidence evidences article articles retrieved")
_ABOUT = names(
    "analysis rationale rationales explanation explanations justification justifications critique critiques reflection "
    "reflections rubric rubrics test tests testcase testcases test_list judgement judgment verdict verification "
    "citation citations examples demonstrations note notes comment comments remark remarks"
)
_CHECKED = names("missing matched covered present")
_OF_A_RUN = names("error errors exception exceptions traceback stacktrace stderr status errormessage")
_RESULTS = names("response output answer result results")
_WRONG = names("wrong incorrect hallucinated distractor distractors false")
_ABOUT_WITH = names("unit case cases answer correct final detailed short long positive negative gold list result s")
_OF_A_PERSON = names("name email mail e_mail phone login handle locale time_zone first_name last_name display_name")
_KNOWN = _ASKED | _ANSWERED | _SAID | PARTIES.keys()
_FILLERS = names(
    "description "
    "my column col field "
    "gt ground approved correct right expected reference ideal best standard canonical preferred chosen the final main "
    "last full raw of for to in on is first current actual real new my str string json value key letter stem"
)
_ROLE_NAMES = names(
    "role from sender speaker author type kind actor source who party participant side direction user agent turn name "
    "sender_type speaker_role author_role user_type sender_role message_type speaker_type participant_role origin "
    "author_type from_role sender_name is_user is_bot is_agent is_human is_ai is_assistant from_user from_bot bot "
    "is_customer is_from_user is_created_by_user is_system isbot isuser"
)
_KIND_NAMES = names(
    "event event_type event_name event_kind entry_type record_type msg_type op subtype topic action name"
)
CONTENT_ORDER = (
    *("content", "contents", "parts", "text", "utterance", "message", "value", "body", "msg", "mes", "transcript"),
    *("sentences", "sentence", "said", "say", "data", "line", "lines", "statement", "txt", "input_text", "blocks"),
    *("segments", "response", "output", "input", "answer"),
)
_ACCEPTED = names("golden gold correct acceptable accepted valid possible reference expected alias")
_EXPECTED = names("gt expected reference ref gold golden truth true correct ideal")
_TRUE = _EXPECTED - {"reference", "ref", "correct"}  # a reference may name a page, and what is correct a letter
_OF_A_MODEL = names("model llm gpt generated predicted prediction claude gemini chatgpt llama qwen deepseek mistral")
_HOLDERS = names("session thread conversation chat request body context trace original event object run parent span")
# What programs say of their own work; columns.py has those that data sets use.
_NOTES = names(
    "scores metrics metric evaluation evaluations stats statistics usage timings performance perf reductions"
)
_VERDICTS = names("acc accuracy correct is_correct passed is_right exact_match")
_BETWEEN_WORDS = re.compile(r"[_\W]+")


def _plain(name: str) -> str:
    return in_english(plain_name(name))


@lru_cache(8192)
def words(name: str) -> tuple[str, ...]:
    """The words of a name or a short value, without digits and plurals: `finalAnswers2` as ("final", "answer")."""
    pieces = (in_english(piece.strip("0123456789")) for piece in _BETWEEN_WORDS.split(_plain(name)))
    return tuple(piece[:-1] if piece[:-1] in _SINGULARS else piece for piece in pieces if piece)


def are_alternatives(path: str) -> bool:
    """Whether several texts of this name are ways to say one answer, as evaluation sets list them."""
    name = path.rpartition(".")[2]
    said = set(words(name))
    return bool(said & {"gt", "truth", "ideal"}) or (name.endswith("s") and bool(_ACCEPTED & said))


def is_a_models(path: str) -> bool:
    """Whether the names say that a model answered: beside another answer, that is one to be judged and not learned."""
    named = [words(name) for name in path.split(".")]
    return bool(_OF_A_MODEL & {word for some in named if some[:1] != ("reward",) for word in some})


def is_expected(path: str) -> bool:
    """Whether the names say that an answer is the right one."""
    return bool(_EXPECTED & {word for name in path.split(".") for word in words(name)})


def is_true(path: str) -> bool:
    """Whether the names say that an answer is the true one, so that another one is that of whoever was tested."""
    said = {word for name in path.split(".") for word in words(name)}
    return bool(_TRUE & said) or said >= {"reference", "answer"}


def is_verdict(name: str, value: Any) -> bool:
    """Whether a column says if an answer was right."""
    return isinstance(value, bool) and plain_name(name) in _VERDICTS


def is_retrieved(name: str) -> bool:
    """Whether a system found what this column holds: beside a true answer, that is the system under test."""
    return bool({"retrieved", "retrieval"} & set(words(name)))


def is_a_question(path: str) -> bool:
    """Whether the last name says question, and nothing else."""
    said = frozenset(words(path.rpartition(".")[2]))
    return bool(said) and said <= _ASKED


def are_of_parties(asked: str, answered: str) -> bool:
    """Whether the names say whose words these are: `user_msg` and `bot_msg`, of which the first may be one word."""
    asker, answerer = set(words(asked.rpartition(".")[2])), set(words(answered.rpartition(".")[2]))
    return bool(asker & ASKERS) and bool(answerer & ANSWERERS)


def is_an_answer(path: str) -> bool:
    """Whether the last name says answer, and nothing else: a person's or a model's, right or wrong."""
    return words(path.rpartition(".")[2]) == ("answer",)


@lru_cache(8192)
def part_of(name: str) -> NamePart:
    """What a column or key of this name holds."""
    plain = _plain(name)
    if plain in TOOLS:
        return "tools"
    if plain in SYSTEM:
        return "system"
    if plain in THOUGHTS or _are_thoughts(plain):
        return "thoughts"
    if plain in _NOTES:
        return "note"
    if (known := column_kind(plain)) in ("note", "media"):
        return "media" if known == "media" else "note"
    said = frozenset(words(name)) - _FILLERS
    if said & _ABOUT and said <= _ABOUT | _ABOUT_WITH:
        return "about"
    if said & _OTHER:
        return "unknown"
    if plain in CONTEXT or said & _GIVEN:
        return _given(plain, said)
    side = _side(said)
    return side or ("content" if known == "content" else "unknown")


def _given(plain: str, said: frozenset[str]) -> Literal["about", "content", "given"]:
    if said & _CHECKED:
        return "about"  # what somebody looked for in the answer
    return "content" if len(plain.rpartition("_")[2]) == 1 else "given"  # option_a alone is one of several


def _are_thoughts(plain: str) -> bool:
    """Whether a name says that somebody thought: `thinking_trace`, `reasoning_process`."""
    said = set(plain.split("_"))
    return bool(said & _THOUGHT) and said <= _THOUGHT | _OF_THOUGHTS


def _side(said: frozenset[str]) -> Literal["asked", "answered", "system"] | None:
    """Whose words a name with these words holds; None where it does not say, or says both."""
    asker, answerer = bool(said & ASKERS), bool(said & ANSWERERS)
    if not said or not said <= _KNOWN or (asker and answerer):
        return None
    if (answerer and said & _QUESTION) or (asker and "answer" in said):
        return None  # who answers otherwise asks here
    if asker or answerer:
        return "asked" if asker else "answered"
    if "system" in said:
        return "answered" if said & _SYSTEM_SAYS else "system" if said & _TELLS_SYSTEM else None
    return _noun(said)


def _noun(said: frozenset[str]) -> Literal["asked", "answered"] | None:
    """The same where nobody is named."""
    asked, answered = bool(said & _ASKED), bool(said & _ANSWERED)
    if asked and not answered:
        return "asked"
    if answered and not asked:
        return None if "input" in said else "answered"
    return "asked" if said in ({"input"}, {"utterance"}, {"input", "text"}) else None


def can_ask(path: str) -> bool:
    """Whether a column of this name may hold what was asked, for somebody who looks at a row that nobody knows."""
    return not _is_number_of_one(path) and part_of(path.rpartition(".")[2]) not in ("answered", "system", "thoughts")


def can_answer(path: str) -> bool:
    """The same for what was answered."""
    named = path.split(".")
    task = words(named[-1])[-1:] in (("instruction",), ("instructions",), ("prompt",))
    if _is_number_of_one(path) or task or is_wrong_answer(named[-1]):
        return False
    if set(words(named[-1])) & _MACHINES and set(words(named[-1])) & _RESULTS:
        return False  # what a tool said
    if any(_OF_A_RUN & (said := set(words(name))) and not said & (_MADE | {"correction"}) for name in named):
        return False  # what became of the run
    beside = any(part_of(name) in ("about", "thoughts", "tools") or _ABOUT & set(words(name)) for name in named)
    return not beside and part_of(named[-1]) not in ("asked", "given", "system")


def _is_number_of_one(path: str) -> bool:
    """Whether a name on the way is the number of one of many: no other row has it."""
    return any(name.isdecimal() or "[" in name for name in path.split("."))


def is_statement(path: str) -> bool:
    """Whether the last word of a name is one for what is to be proved."""
    return words(path.rpartition(".")[2])[-1:] in (("statement",), ("theorem",))


def is_proof(path: str) -> bool:
    """Whether the last word of a name is one for a proof."""
    return words(path.rpartition(".")[2])[-1:] == ("proof",)


def is_wrong_answer(name: str) -> bool:
    """Whether a name is one for an answer that is wrong: beside the right one it is about it."""
    said = set(words(name))
    return bool(said & _WRONG) and bool(said & (_ANSWERED | _WRONG))


def answers_somehow(name: str) -> bool:
    """Whether the last word of a name is one for an answer, whatever words qualify it: `genAlphaReply`."""
    *qualifiers, last = words(name) or ("",)
    true_query = last == "query" and bool(_TRUE & set(qualifiers))
    answers = last in ("reply", "response", "answer", "generated") or last in _MADE or true_query
    return answers and not set(qualifiers) & (_OTHER | _GIVEN | _ABOUT | _ASKED)


def asks_somehow(path: str) -> bool:
    """Whether the last word of a name is one for a question, whatever words qualify it: `legal_question`."""
    *qualifiers, last = [word for word in words(path.rpartition(".")[2]) if word != "used"] or [""]
    others = _OTHER | _GIVEN | _ABOUT | _ANSWERED | _OF_A_RUN | {"system"}
    return last in _QUESTIONS and not set(qualifiers) & others


def is_asked_by_its_like(answer: str, paths: Iterable[str]) -> bool:
    """Whether one of `paths` is a question of what `answer` is an answer of: `faq_question` and `faq_answer`."""
    above, _, name = answer.rpartition(".")
    said = words(name)[:-1]
    alike = (path for path in paths if path.rpartition(".")[0] == above and asks_somehow(path))
    return bool(said) and any(words(path.rpartition(".")[2])[:-1] == said for path in alike)


def role_of(value: str) -> Role | None:
    """The role that a short word names: `HumanMessage`, `ROLE_USER`, `ai`, `tool_result`; none for `rejected_gpt`."""
    plain = in_english(value.strip().lower().replace(" ", "_"))
    if plain in PARTIES:
        return PARTIES[plain]
    said = words(value)
    if not 0 < len(said) <= 4 or any(c.isdecimal() for c in value) or not OF_TWO_ANSWERS.isdisjoint(said):
        return None  # user_1 and user_2 are two
    found = {PARTIES[word] for word in said if word in PARTIES}
    return found.pop() if len(found) == 1 else None


def is_note(path: Sequence[str]) -> bool:
    """Whether a path leads to a note, or to something below one. What a session holds is no note as its name is one."""
    *above, last = path
    return part_of(last) == "note" or any(part_of(name) == "note" and not _HOLDERS & set(words(name)) for name in above)


def is_of_a_person(path: Sequence[str]) -> bool:
    """Whether a path leads to what somebody is called or reached by: `requester.email`, `agent.name`."""
    return len(path) > 1 and _plain(path[-1]) in _OF_A_PERSON and bool((ASKERS | ANSWERERS) & set(words(path[-2])))


def is_reference(name: str, value: str) -> bool:
    """Whether the document of this name is only named: `page_12`, `guides/returns.txt`."""
    said = set(words(name))
    if said & _SETTINGS and value.isascii() and len(value.split()) == 1:
        return True
    return bool(_DOCUMENTS & said) and names_document(value)


def says_nothing(word: str) -> bool:
    """Whether a word of a name tells nothing of what it holds."""
    return word not in _ASKED | _ANSWERED | _SAID | _OTHER | _FILLERS | PARTIES.keys() | _OF_A_MODEL


def names_role(path: str) -> bool:
    """Whether somebody would write who speaks under the last name of `path`."""
    plain = _plain(path.rpartition(".")[2])
    return plain in _ROLE_NAMES


def names_kind(path: str) -> bool:
    """Whether a program would write what kind of event something is under the last name of `path`."""
    plain = _plain(path.rpartition(".")[2])
    return plain in _KIND_NAMES or plain in _ROLE_NAMES


def likely_contents(paths: Iterator[str]) -> list[str]:
    """Those paths whose last name is one for what was said, the likeliest first."""
    known = [(_plain(path.rpartition(".")[2]).removesuffix("_json"), path) for path in paths]
    ranked = [(CONTENT_ORDER.index(name), path.count("."), path) for name, path in known if name in CONTENT_ORDER]
    return [path for *_, path in sorted(ranked)]
