"""Every reason for which a row is not used as it came: its severity, its meaning and what to do about it.

This table is the only list. docs/data-checks.md is held equal to it by a test.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["reject", "set_aside", "warn"]


@dataclass(frozen=True, slots=True)
class Reason:
    """`reject`: broken, can be mended. `set_aside`: fine, left out by policy. `warn`: used, but not as it came."""

    severity: Severity
    meaning: str
    hint: str


class RowRefused(Exception):
    """One row can't be used. `reason` is a key of REASONS; `hint` says what to do with this very row."""

    def __init__(self, reason: str, hint: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.hint = hint or REASONS[reason].hint


def not_utf8(byte: int, before: str) -> RowRefused:
    """Return the reason for a byte that is no UTF-8, with the encoding that it most likely is in."""
    name = "Windows-1252" if 0x80 <= byte <= 0x9F else "Latin-1 or Windows-1252"
    context = " ".join(before.split())[-20:]
    remedy = "convert it: iconv -f WINDOWS-1252 -t UTF-8"
    return RowRefused("bad-utf8", f"byte 0x{byte:02X} behind {context!r}: the text may be {name}; {remedy}")


REASONS: dict[str, Reason] = {
    # The bytes and the JSON
    "bad-utf8": Reason("reject", "the line is not UTF-8 text", "save the file as UTF-8"),
    "nul-byte": Reason(
        "reject", "a NUL byte: part of the file was lost or it is binary", "restore the file or delete the line"
    ),
    "bad-json": Reason("reject", "the line is not JSON", "mend the JSON of this line"),
    "truncated-line": Reason(
        "reject", "the last line breaks off: its writer died or still writes", "complete or delete the last line"
    ),
    "too-deep": Reason("reject", "JSON nested deeper than any row needs", "flatten the row"),
    "line-too-large": Reason("reject", "one row of more than 16 MiB", "split the row"),
    "broken-file": Reason(
        "reject", "the file can't be read further: damaged compression, CSV, JSON array or Parquet", "restore the file"
    ),
    "damaged-row": Reason(
        "reject",
        "a row of the store is not what was stored: the disk or another program changed it",
        "restore hive.db from a copy, or collect the row again from its source",
    ),
    "not-an-object": Reason(
        "reject", "the row is JSON, but no object", 'write each row as {"prompt": ..., "completion": ...}'
    ),
    "csv-columns": Reason(
        "reject", "the row has more or fewer fields than the header", "quote fields that hold commas or line breaks"
    ),
    "csv-quote": Reason(
        "reject",
        "a quote is opened and not closed, or closed within a field",
        'close it; inside a quoted field write two quotes ("") for one',
    ),
    # The shape of the row
    "unread-column": Reason(
        "reject",
        "equal questions have different answers, and a column that is not read tells them apart",
        "name the column in the mapping, or leave it out on purpose: --columns prompt=...,completion=...",
    ),
    "unknown-layout": Reason(
        "reject", "no known columns", "map your columns, for example --columns prompt=my_question,completion=my_answer"
    ),
    "unexplained-column": Reason(
        "reject",
        "a column looks like content, and the layout has no place for it",
        "name the columns to learn from, for example --columns prompt=my_question,completion=my_answer",
    ),
    "one-message": Reason(
        "reject",
        "one message of a conversation: its turns are in rows of their own",
        "join the messages of each conversation to one row with a list `messages`",
    ),
    "rendered-text": Reason(
        "reject",
        "a text that holds a conversation with the marks of a template: learned whole, its questions would be too",
        "give the turns as a list `messages`, or --columns text=text if the whole text is the lesson",
    ),
    "session-line": Reason(
        "reject",
        "one line of a coding agent's session, whose other lines are elsewhere",
        "give the session's own file, as the agent wrote it",
    ),
    "earlier-turns-missing": Reason(
        "reject",
        "the record continues a conversation that only the provider has",
        "log the whole conversation: previous_response_id names turns that are not in the row",
    ),
    "wrong-type": Reason("reject", "a field has another type than its name promises", "make it a string"),
    "no-messages": Reason("reject", "the list of messages is empty", "give at least one question and its answer"),
    "who-answers": Reason(
        "reject",
        "several people speak, and nothing says who of them answers",
        "name who answers: --columns assistant=NAME",
    ),
    "unknown-role": Reason(
        "reject", "a message's role is none of system, user, assistant, tool", "rename the role to one of these four"
    ),
    "role-order": Reason(
        "reject",
        "roles come in an order no conversation has",
        "system first, then user and assistant in turn; a tool answer only after a tool call",
    ),
    "no-answer": Reason(
        "reject", "there is no assistant message to learn from", "add the answer, or leave the row out"
    ),
    "unsupported-content": Reason("reject", "content that is not text: image, audio, file", "keep the text parts only"),
    "bad-tool-call": Reason(
        "reject", "a tool call without a name or with arguments that are no JSON object", "write arguments as an object"
    ),
    "bad-weight": Reason("reject", "a message's weight is neither 0 nor 1", "1: learn from it, 0: only read it"),
    "preference-row": Reason(
        "reject",
        "chosen/rejected pairs are for preference training",
        "learn: [sft, pairs], or map completion to the chosen column",
    ),
    "equal-pair": Reason("reject", "the better and the worse answer are the same", "correct or delete the row"),
    "pair-differs": Reason(
        "reject",
        "the better and the worse answer do not answer the same question, or are not one turn each",
        "make the turns before both answers equal",
    ),
    # The text
    "lone-surrogate": Reason(
        "reject", "half of a character (a lone surrogate)", "the text was cut inside a character, mostly an emoji"
    ),
    "mojibake": Reason(
        "reject", "UTF-8 text that was read as Windows-1252 (Ã© for é)", "read the source again as UTF-8"
    ),
    "replacement-character": Reason(
        "reject", "the character U+FFFD: bytes were lost when the text was decoded", "decode the source again"
    ),
    "empty-question": Reason("reject", "a question without text", "fill it in or delete the row"),
    "empty-answer": Reason("reject", "an answer without text", "fill it in or delete the row"),
    "placeholder-answer": Reason(
        "reject",
        "there is no answer: a placeholder (TBD, n/a, #REF!, [deleted]) or an API's error stands in its place, or a"
        " form was not filled in",
        "write the answer or delete the row",
    ),
    "answer-is-question": Reason("reject", "the answer repeats the question, or its end", "write a real answer"),
    "repeated-loop": Reason("reject", "the answer repeats itself without end", "cut the answer before it loops"),
    "control-token": Reason(
        "reject",
        "the text holds one of the model's control tokens, which would end or fake a turn",
        "delete the token from the text",
    ),
    "secret": Reason("reject", "a password, key or token, and data.on_secret is reject", "remove it and revoke it"),
    "personal": Reason(
        "reject", "personal data, and data.on_personal is reject", "remove it, or set data.on_personal: redact"
    ),
    # The template, the tokens and the mask (need a model)
    "template-error": Reason(
        "reject", "the model's chat template can't render the row", "see the message; often the order of the roles"
    ),
    "template-limit": Reason(
        "reject",
        "the model's chat template takes too long or too much memory for this row",
        "use the template that belongs to the model",
    ),
    "not-in-template": Reason(
        "reject",
        "the template leaves out a part of the row: a tool call, a tool, reasoning, a system prompt",
        "use a model whose template has a place for it, or data.on_tools: leave_out (data.on_reasoning for reasoning)",
    ),
    "part-not-found": Reason(
        "reject",
        "the template rewrites a part of the row, so that the text is not what the row says",
        "see the message; write the part as the template does",
    ),
    "mask-disagreement": Reason(
        "reject",
        "two independent ways to find the trained tokens differ",
        "remove text that looks like the template's own markers",
    ),
    "border-in-token": Reason(
        "reject",
        "the answer's first character melts with the prompt into one token",
        "remove the white space at the start of the answers, or move it to the end of the questions",
    ),
    "no-trained-token": Reason("reject", "nothing in the row would be trained", "give one answer the weight 1"),
    "end-not-trained": Reason(
        "reject", "no end token after the answer: the model would never learn to stop", "use the model's own template"
    ),
    "pad-trained": Reason("reject", "the padding token would be trained", "delete the token from the text"),
    "too-long": Reason(
        "reject", "more tokens than max_length", "raise max_length, or set data.on_overlong: cut_turns or cut"
    ),
    "too-long-characters": Reason(
        "reject", "more characters than any usual max_length (checked without a model)", "split the row"
    ),
    "too-slow": Reason(
        "reject", "checking the row took more than 20 s of processor time", "split the row, or look at what it holds"
    ),
    # By policy
    "filtered": Reason("set_aside", "data.columns says `where`, and the row is another one", "nothing to do"),
    "failed": Reason(
        "set_aside", "the row's own success is false", "learn: [sft, failures] learns from it, as a bad answer"
    ),
    "disliked": Reason(
        "set_aside", "the row's own feedback is negative", "learn: [sft, failures] learns from it, as a bad answer"
    ),
    "failed-outside": Reason(
        "set_aside",
        "it failed by a time-out, a tool or the network: its answer teaches nothing",
        "nothing; the row itself says so, in its error or reason",
    ),
    "not-learned": Reason("set_aside", "the setting learn does not name rows of its kind", "see learn in the config"),
    "for-stage-2": Reason(
        "set_aside", "a bad answer: stage 2 learns from it, nothing else does", "hivetune learn CONFIG runs both stages"
    ),
    "bad-held-out": Reason(
        "set_aside", "a bad answer whose group is held out for validation or test", "nothing; its side is its group's"
    ),
    "contradictory": Reason(
        "set_aside",
        "one row calls this answer good, another one bad",
        "decide which of the two is right and delete the other",
    ),
    "quota-user": Reason(
        "set_aside", "its user has more bad answers than learn.quota_per_user", "raise learn.quota_per_user"
    ),
    "cut-off-answer": Reason(
        "set_aside",
        "the answer was cut, as its log or the ends of others in its file say: its end would be learned as one",
        "raise the limit where the answers are made",
    ),
    "no-question": Reason("set_aside", "a piece of a session in which nobody asks", "give the session's beginning too"),
    "broken-line": Reason("set_aside", "a line of a session is no JSON", "nothing; the rest of the session is read"),
    "not-a-model-call": Reason(
        "set_aside", "a step of a trace that is no model's answer (a tool, a retriever, a chain)", "nothing is lost"
    ),
    "not-held": Reason(
        "set_aside", "it rests on an image, a file or a tool of program or provider, which its log lacks", "nothing"
    ),
    "own-answer": Reason(
        "set_aside",
        "the answer is a release's own, and nobody rated it up or checked it",
        "rate it (POST /v1/feedback), or data.on_own_answers: train would use it",
    ),
    "untrusted": Reason(
        "set_aside", "the text to learn came from a tool or a web page", "data.on_untrusted: train would use it"
    ),
    "forgotten": Reason(
        "set_aside", "its user, session, source or row was forgotten", "hivetune data forget was asked to keep it out"
    ),
    "frozen-question": Reason(
        "set_aside",
        "it asks a frozen question, which releases are judged by and none may learn",
        "nothing; see them: hivetune frozen",
    ),
    "quota-source": Reason("set_aside", "the source has more rows than data.quota_per_source", "raise the quota"),
    "quota-session": Reason("set_aside", "the session has more rows than data.quota_per_session", "raise the quota"),
    "only-tool-calls": Reason(
        "set_aside",
        "without its calls of tools no answer is left, and data.on_tools is leave_out",
        "use a model whose template has a place for calls, and data.on_tools: train",
    ),
    "synthetic-share": Reason(
        "set_aside",
        "synthetic rows are more than data.synthetic_share of the rows",
        "collect more rows of your own, or raise the share",
    ),
    "balance": Reason("set_aside", "its agent or category has more rows than the others", "data.balance: none"),
    # By a cycle's choice of rows, through data.leave_out
    "own-share": Reason(
        "set_aside",
        "answers of the releases themselves would be more than 25 % of the trained tokens",
        "correct some of them (POST /v1/feedback): a correction is a person's answer",
    ),
    "own-evidence": Reason(
        "set_aside", "the answer is a release's own: it can't be evidence for or against one", "correct it"
    ),
    "user-share": Reason(
        "set_aside",
        "its user would have more than 30 % of the tokens",
        "nothing; the share grows with other users' rows",
    ),
    "source-share": Reason(
        "set_aside", "its source would have more than 30 % of the tokens", "nothing; the share grows with other sources"
    ),
    "general-share": Reason("set_aside", "general rows would be more than 5 % of the tokens", "nothing"),
    "next-cycle": Reason(
        "set_aside", "a new row beyond what the budget can train now: it stays new", "raise cycle.budget_hours"
    ),
    "not-replayed": Reason(
        "set_aside",
        "an old row beyond the budget that the champion scores better than those that are trained again",
        "raise cycle.budget_hours or cycle.replay",
    ),
    "suspect": Reason(
        "set_aside",
        "it is of the new rows of a cycle whose model was worse, and the same training without them was better",
        "look at them; if they are right: hivetune cycle admit NAME",
    ),
    "other-domain": Reason(
        "set_aside", "an expert is trained on its own domain and on a few rows of the others", "nothing"
    ),
    # Used, but changed; always counted
    "merged-turns": Reason(
        "warn", "consecutive turns of one role were joined to one, with an empty line between them", "nothing to do"
    ),
    "turns-from-text": Reason(
        "warn",
        "speakers or a template's marks in a text were read as the turns of a conversation, or taken off its ends",
        "nothing to do",
    ),
    "leading-answer": Reason("warn", "turns before the first question were left out", "nothing to do"),
    "trailing-turns": Reason("warn", "turns after the last answer were left out", "add the answer, if there is one"),
    "lone-thought": Reason("warn", "thoughts that no answer follows were left out", "nothing to do"),
    "nul-in-result": Reason("warn", "NUL characters in a tool's result were replaced by U+FFFD", "nothing to do"),
    "source-marks": Reason("warn", "marks of sources that a log does not hold were left out", "nothing to do"),
    "ends-before-media": Reason(
        "warn", "a conversation ends before the first image, file or tool that its log does not hold", "nothing to do"
    ),
    "other-answers": Reason(
        "warn", "the record has several answers to one question: the first is learned", "keep the answer that you want"
    ),
    "json-answer": Reason("warn", "an answer that is an object was written as JSON text", "nothing to do"),
    "small-edit": Reason(
        "warn",
        "the two answers differ in less than a tenth of their words: the better one is learned alone",
        "nothing; a pair that differs so little would make both less likely",
    ),
    "label-answer": Reason(
        "warn",
        "an answer such as None or n/a was kept: many rows of its file share few answers, so it is one of its classes",
        "delete the row if it is no answer",
    ),
    "worse-left-out": Reason(
        "warn", "the worse answer can't be used; the better one is learned alone", "see the reason behind it"
    ),
    "left-out-columns": Reason(
        "warn",
        "columns about the answer or the conversation are left out: a rationale, an explanation, tests, a note",
        "nothing to do; --columns chooses others",
    ),
    "other-branches": Reason(
        "warn",
        "retries and edits that were given up are left out: the branch that was kept is learned",
        "nothing to do",
    ),
    "program-notes": Reason(
        "warn",
        "errors, commands and notes that a coding agent itself wrote into its session are left out",
        "nothing to do",
    ),
    "call-without-result": Reason(
        "warn",
        "a log does not hold what a call of a tool gave back: an empty result stands for it",
        "leave the row out if its answers tell what the results said",
    ),
    "result-without-call": Reason(
        "warn", "results of tools whose calls a log does not hold were left out", "nothing to do"
    ),
    "internal-notes": Reason(
        "warn", "notes that a help desk's people wrote to each other are left out", "nothing to do"
    ),
    "markup": Reason("warn", "the HTML of a help desk's messages was read as text", "nothing to do"),
    "tools-left-out": Reason(
        "warn",
        "calls of tools and their results were left out: each question is learned with what was said behind them",
        "data.on_tools: train, and a model whose template has a place for calls",
    ),
    "reasoning-left-out": Reason(
        "warn",
        "the reasoning before an answer was left out",
        "data.on_reasoning: train, and a model whose template has a place for it",
    ),
    "redacted-secret": Reason("warn", "a secret was replaced by [SECRET]", "revoke it: it was in a log"),
    "redacted-personal": Reason("warn", "personal data was replaced by a placeholder", "data.on_personal: keep"),
    "cut": Reason("warn", "the end was cut at max_length; the last answer's end is not trained", "raise max_length"),
    "cut-turns": Reason("warn", "the last turns were left out to fit max_length", "raise max_length"),
    "decoded-windows-1252": Reason(
        "warn",
        "the row was not UTF-8; it was read as Windows-1252, where all Latin encodings agree or the language tells",
        "save the file as UTF-8",
    ),
    "byte-order-mark": Reason(
        "warn", "a byte order mark (U+FEFF) inside the file was left out", "nothing; files were joined or pasted"
    ),
    "turn-by-turn": Reason(
        "warn",
        "the template rewrites earlier turns, so each answer is trained behind the prompt that a server would make",
        "nothing; the row counts once, its tokens are those of all its answers",
    ),
    "empty-thought": Reason(
        "warn",
        "the template writes a thought before the answer, the row has none: an empty one is trained",
        "add reasoning to the row, or use a model that does not think",
    ),
    "tool-call-ids": Reason(
        "warn",
        "the template writes ids of tool calls that the row lacks, or in another form: they were made from it",
        "give each call an id in the form that the model uses",
    ),
}


def severity_of(reason: str) -> Severity:
    return REASONS[reason].severity
