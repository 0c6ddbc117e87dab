"""What is decided for a whole file by its first rows, so that one row is not read otherwise than the next.

Columns under names that nobody knows which hold a label in every row (an app, a theorem, a kind of task): where others
hold two words of it, five words are no text that somebody has to explain. And which columns hold the question and the
answer: "hi" is a question where the other rows have longer ones, and "020" the answer of a solution that says 20. And
whether its rows are prompts alone: then a prompt that shows a question with its answer is no talk. And which columns
are doubted, as most rows with the same ones are refused: what is read of the others is read by chance. And at which
length answers were cut, as several end there inside a sentence.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hivetune.data.intake.files import Chunk
from hivetune.data.pieces.fields import plain_name
from hivetune.data.pieces.said import Conversation, Row
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.conversation import NOT_KNOWN, read_conversation
from hivetune.data.rows.find.given import gathered
from hivetune.data.rows.find.leaves import open_paths
from hivetune.data.rows.find.names import answers_somehow, asks_somehow, part_of
from hivetune.data.rows.find.pair import PairSpots, spots_in
from hivetune.data.rows.find.row import read_structure, without_prefix
from hivetune.data.rows.find.talk.turn_lists import both_sides
from hivetune.data.rows.find.written import with_written_answer
from hivetune.data.rows.layouts.columns import looks_like_content
from hivetune.data.rows.layouts.pairs import LABELS

MOST_WORDS, MOST_CHARS = 8, 80  # of a label
MIN_ROWS = 5  # in which every value may be short by chance
BARE_SHARE = 0.5  # of the values that are no text by themselves
SAME_SHARE = 0.6  # of the rows, whose question and answer stand in the same columns
LEAST_CUT_CHARS = 200  # shorter answers may be as long as each other by chance
CUT_NEAR_CHARS = 12  # by which cut answers differ: white space goes after the cut, and three points come
CUT_ROWS, CUT_SHARE = 4, 0.7  # how many different answers of one length, and how many of these end inside a sentence
CUT_OF_ROWS = 10  # different answers of a file: among fewer, four are as long as each other by chance
WHOLE_SHARE = 0.5  # of the shorter answers: where they end anyhow too (words, code), the ends say nothing


def label_columns(rows: Sequence[Any]) -> tuple[str, ...]:
    """The columns of a file, by its first rows, whose values are labels."""
    objects = [row for row in rows if isinstance(row, dict)]
    if len(objects) < MIN_ROWS:
        return ()
    found = dict.fromkeys(name for row in objects for name in row if _may_be_label(name))
    return tuple(name for name in found if _are_labels([row.get(name) for row in objects]))


def _may_be_label(name: str) -> bool:
    is_class = plain_name(name) in LABELS  # of a text it may be what is to be learned
    return part_of(name) == "unknown" and not (is_class or answers_somehow(name) or asks_somehow(name))


def _are_labels(values: Sequence[Any]) -> bool:
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if len(texts) < MIN_ROWS or not all(_is_short(text) for text in texts):
        return False
    return sum(not looks_like_content(text) for text in texts) >= BARE_SHARE * len(texts)


def _is_short(text: str) -> bool:
    return len(text) <= MOST_CHARS and len(text.split()) < MOST_WORDS


def without_labels(row: Row, labels: Sequence[str]) -> Row:
    """The row without what is a label in it."""
    if not labels:
        return row
    plain = {plain_name(name) for name in labels}
    return {
        name: value
        for name, value in row.items()
        if not (plain_name(name) in plain and isinstance(value, str) and _is_short(value))
    }


def pair_columns(rows: Sequence[Any]) -> tuple[str, ...]:
    """Where most of the first rows of a file have their question and their answer, as PairSpots in one list (question,
    answer, task or "", answers that are not learned); empty where they differ, or where a layout reads otherwise.
    """
    objects = [row for row in rows if isinstance(row, dict)]
    if len(objects) < MIN_ROWS:
        return ()
    found = [(row, spots) for row in objects if (spots := _spots_of(row)) is not None]
    counts = Counter((spots.asked, spots.answered, spots.task or "") for _, spots in found)
    [(columns, count)] = counts.most_common(1) or [(("", "", ""), 0)]
    if count < SAME_SHARE * len(objects):
        return ()
    alike = [(row, spots) for row, spots in found if (spots.asked, spots.answered, spots.task or "") == columns]
    others = dict.fromkeys(path for _, spots in alike for path in spots.judged)
    decided = (*columns, *others)
    return decided if all(_is_read_so(row, decided) for row, _ in alike) else ()


def _spots_of(row: Row) -> PairSpots | None:
    """Where the question and the answer of a row stand that is read by its structure."""
    try:
        if read_conversation(row).layout != "structure":
            return None
        spots = spots_in(gathered(with_written_answer(without_prefix(row))))
    except (RowRefused, RecursionError):
        return None
    return None if spots.made else spots


def _is_read_so(row: Row, decided: Sequence[str]) -> bool:
    try:
        return _read_so(row, decided).messages == read_conversation(row).messages
    except RowRefused:
        return False


def _read_so(row: Row, decided: Sequence[str]) -> Conversation:
    asked, answered, task, *judged = decided
    return read_structure(row, decided=PairSpots(asked, answered, task or None, judged))


def are_prompts(rows: Sequence[Any]) -> bool:
    """Whether most of the first rows of a file ask something, and neither they nor their columns answer it."""
    objects = [row for row in rows if isinstance(row, dict)]
    if len(objects) < MIN_ROWS:
        return False
    return sum(_only_asks(row) and not _is_read(row) for row in objects) >= SAME_SHARE * len(objects)


def _only_asks(row: Row) -> bool:
    asked, answered = both_sides(open_paths(row))
    return bool(asked) and not answered


def _is_read(row: Row) -> bool:
    return _unless_refused(read_conversation, row) is not None


Reading = tuple[Row, Conversation | RowRefused]


def readings(rows: Sequence[Any], labels: Sequence[str], decided: Sequence[str]) -> list[Reading]:
    """What the first rows of a file are read as, or why they are refused. `labels`, `decided`: what else was found."""
    found: list[Reading] = []
    for row in (row for row in rows if isinstance(row, dict)):
        try:
            found.append((row, _read_somehow(row, labels, decided)))
        except RowRefused as reason:
            found.append((row, reason))
        except RecursionError:
            continue
    return found


def cut_length(read: Sequence[Reading]) -> int:
    """The length in characters at which answers of a file were cut, by its first rows; 0: none were."""
    answers = {said.messages[-1].content.strip() for _, said in read if not isinstance(said, RowRefused)}
    longest = max(map(len, answers), default=0)
    near = {answer for answer in answers if len(answer) >= longest - CUT_NEAR_CHARS}
    if longest < LEAST_CUT_CHARS or len(near) < CUT_ROWS or len(answers) < CUT_OF_ROWS:
        return 0
    shorter = answers - near
    if sum(map(_ends_inside, shorter)) > (1 - WHOLE_SHARE) * len(shorter):
        return 0
    return longest if sum(map(_ends_inside, near)) >= CUT_SHARE * len(near) else 0


def _ends_inside(answer: str) -> bool:
    """Whether a text ends inside a sentence, or says so by three points. A text without words has none."""
    end = answer.removesuffix("...").removesuffix("\u2026").rstrip()[-1:]
    return looks_like_content(answer) and (end.isalnum() or end in (",", ";", "(")) and len(answer.split()) > 1


def doubted_columns(read: Sequence[Reading]) -> tuple[str, ...]:
    """The columns, as one text, of those of the first rows of a file of which fewer are read by their structure than
    are refused.
    """
    refused: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for row, said in read:
        if isinstance(said, RowRefused):
            refused[_columns(row)] += said.reason in NOT_KNOWN
        else:
            found[_columns(row)] += said.layout == "structure"
    return tuple(one for one, count in found.items() if 0 < count < refused[one] and count + refused[one] >= MIN_ROWS)


def _columns(row: Row) -> str:
    return "\n".join(row)


def read_as_its_file(row: Row, chunk: Chunk | None) -> Conversation:
    """The conversation of a row, as what was decided for its file says. Raises RowRefused."""
    if chunk is None:
        return read_conversation(row)
    said = _read_somehow(row, chunk.labels, chunk.pair)
    if chunk.prompts and "turns-from-text" in said.changed and _only_asks(row):
        raise RowRefused("no-answer", "a prompt that shows an answer, in a file of prompts")
    if chunk.doubted and said.layout == "structure" and _columns(row) in chunk.doubted:
        raise RowRefused("unknown-layout", "most rows with these columns are not understood")
    answer = said.messages[-1].content.strip()
    if chunk.cut_chars and abs(len(answer) - chunk.cut_chars) <= CUT_NEAR_CHARS and _ends_inside(answer):
        raise RowRefused(
            "cut-off-answer", f"several answers of the file end inside a sentence at {chunk.cut_chars} characters"
        )
    return said


def _read_somehow(row: Row, labels: Sequence[str], decided: Sequence[str]) -> Conversation:
    """The conversation of a row; where it alone cannot be read, without what is a label in it, else from the columns
    that were decided for its file. Raises RowRefused.
    """
    try:
        return read_conversation(row)
    except RowRefused as refused:
        if refused.reason not in NOT_KNOWN:
            raise
        rest = without_labels(row, labels)
        found = _unless_refused(read_conversation, rest) if len(rest) < len(row) else None
        if found is None and decided:
            found = _unless_refused(_read_so, rest, decided)
        if found is None:
            raise
        return found


def _unless_refused(read: Callable[..., Conversation], *given: Any) -> Conversation | None:
    try:
        return read(*given)
    except RowRefused:
        return None  # the row's own reason is told: nobody asked for this reading
