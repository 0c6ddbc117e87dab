"""At which length the answers of a file were cut: several end there inside a sentence."""

from collections.abc import Collection

from hivetune.data.columns import looks_like_content

LEAST_CUT_CHARS = 200  # shorter answers may be as long as each other by chance
CUT_NEAR_CHARS = 12  # by which cut answers differ: white space goes after the cut, and three points come
CUT_ROWS, CUT_SHARE = 4, 0.7  # how many different answers of one length, and how many of these end inside a sentence
CUT_OF_ROWS = 10  # different answers of a file: among fewer, four are as long as each other by chance
WHOLE_SHARE = 0.5  # of the shorter answers: where they end anyhow too (words, code), the ends say nothing


def cut_length(answers: Collection[str]) -> int:
    """Return the length in characters at which answers of a file were cut, by its first rows; 0: none were."""
    answers = {answer.strip() for answer in answers}
    longest = max(map(len, answers), default=0)
    near = {answer for answer in answers if len(answer) >= longest - CUT_NEAR_CHARS}
    if longest < LEAST_CUT_CHARS or len(near) < CUT_ROWS or len(answers) < CUT_OF_ROWS:
        return 0
    shorter = answers - near
    if sum(map(ends_inside, shorter)) > (1 - WHOLE_SHARE) * len(shorter):
        return 0
    return longest if sum(map(ends_inside, near)) >= CUT_SHARE * len(near) else 0


def ends_inside(answer: str) -> bool:
    """Return whether a text ends inside a sentence, or says so by three points. A text without words has none."""
    end = answer.removesuffix("...").removesuffix("\u2026").rstrip()[-1:]
    return looks_like_content(answer) and (end.isalnum() or end in (",", ";", "(")) and len(answer.split()) > 1
