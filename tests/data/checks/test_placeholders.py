"""Answers that stand for a missing one are refused with their line; real answers of the same words stay."""

import json
from collections import Counter
from pathlib import Path

import pytest

from hivetune.config import DataConfig
from hivetune.data.checks.placeholders import placeholder_in, share_few_labels
from hivetune.data.prepare.prepare import check

ASKED = "Which plan does this customer have?"
MISSING = (
    *(
        "TBD",
        "tbd.",
        "n/a",
        "N/A",
        "#REF!",
        "#N/A",
        "#DIV/0!",
        "#BEZUG!",
        "#¿NOMBRE?",
        "#NV",
        "-",
        "—",
        "?",
        "...",
        "null",
    ),
    *("None", "NaN", "see above", "See above.", "siehe oben", "TODO", "to be determined", "[deleted]", "[removed]"),
    *("<Media omitted>", "This message was deleted", "Lorem ipsum dolor sit amet, consectetur.", "{{ answer }}"),
    *(
        "<your answer here>",
        "[insert response]",
        '{"error": "bad key"}',
        "Rate limit exceeded",
        "429 Too Many Requests",
    ),
    *("Error code: 429 - {'error': {'message': 'slow down'}}", "Internal Server Error", "Request timed out."),
    *('{"error": {"message": "x", "type": "y"}, "status": 500}', "You exceeded your current quota, please check it."),
    *("Error: name 'stoi' is not defined", 'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 3'),
    *("❌ Pas de réponse générée.", "⚠️ No response was generated.", "Keine Antwort erhalten", "未生成回答"),
    *(
        "Failed to generate a response",
        "❌ Error: connection refused",
        "Nessuna risposta generata",
        "Ответ не получен.",
    ),
    *("API Error: 429", "API error (500): overloaded", "HTTP 503", "HTTP Error 502.", "Error 429"),
    *("Request failed with status code 500", "Server error: 503", "LLM call error: 429, slow down"),
    *("[trimmed for this test]", "<output omitted>", "(content removed)"),
    *("###", "====", "</s>", "<|im_end|>", "<|eot_id|>", "[/INST]"),
    *(
        "Sorry, the model is currently unavailable. Your question was kept.",
        "Извините, большая модель сейчас недоступна. Вопрос записан.",
        "Entschuldigung, das Modell ist derzeit nicht verfügbar.",
        "Désolé, le modèle est actuellement indisponible.",
        "抱歉，模型暂时不可用。",
    ),
    *("Dummy Summary", "This is a placeholder answer.", "sample output 3", "Mock response for case 7", "[dummy text]"),
    *("TODO: write the answer", "TODO - add it", "[to be filled in]", "Fill me in", "Your answer here", "ANSWER_HERE"),
    *("Insert your summary here", "...answer goes here...", "assistant response", "Expected output", "Model answer 12"),
    *("Error: 503 Service Unavailable", "[object Object]", "同上", "{}", "openai.RateLimitError: slow down"),
)
ANSWERS = (
    *("##", "**", "==", "# One", "The red model is out of stock.", "The model is not available in red."),
    *("Yes", "No", "#python", "#1", "C#", "7", "-7", "[SECRET:github]", "Pending orders are listed below.", "n", "A"),
    *(
        "N/A is what the sheet shows for a broken look-up.",
        '{"error": null, "rows": 3}',
        '{"total": 3}',
        "$5",
        "[1, 2]",
    ),
    *(
        "No answer was found in the document.",
        "No response is needed.",
        "❌",
        "❌ Wrong: it is 7.",
        "Pas de réponse simple.",
    ),
    *(
        "429",
        "500 errors were found.",
        "Errors 404 and 500",
        "Terror 404",
        "HTTP 2",
        "The error 12 stands on page 500.",
    ),
    *("A dummy is a model of a person.", "Here is my answer", "Sample the soil first.", "The answer is here.", "Text"),
    *(
        "TODOs are notes.",
        "Reply to all",
        "Write your name here",
        "The response was late.",
        "Example 3",
        "Your turn here",
    ),
    *("The rate limit is 60 a minute.", "Nothing", "I see above all a need for rest.", "<b>bold</b>", "{name}", "xx"),
    *(
        "Your answer was right.",
        '{"error": "low", "confidence": 0.2}',
        "Timeouts",
        "Unknown",
        "%d",
        "[x]",
        "(a)",
        "Null"[:2],
    ),
)


def test_events_of_a_stream_are_no_answer() -> None:
    events = 'event: delta\r\ndata: {"said": "Lamps"}\r\n\r\n' * 40
    assert placeholder_in(events, [ASKED]) is not None
    assert placeholder_in('data: {"said": "Lamps"}\n\n', [ASKED]) is not None
    assert placeholder_in("data: two lamps and a table", [ASKED]) is None


@pytest.mark.parametrize("answer", MISSING)
def test_what_stands_for_a_missing_answer(answer: str) -> None:
    assert placeholder_in(f" {answer}\n", [ASKED]) is not None


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_an_answer(answer: str) -> None:
    assert placeholder_in(answer, [ASKED]) is None


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("Name the plan; reply N/A if there is none.", "N/A"),
        ("Does print() return None or 0?", "None"),
        ('Write "?" where you do not know.', "?"),
        ("What does HTTP 429 mean?", "Too Many Requests"),
        ("Give a JSON error for a missing key.", '{"error": "missing key"}'),
        ("Which dummy text begins with Lorem ipsum?", "Lorem ipsum dolor sit amet"),
        ("Answer TBD while nobody knows.", "TBD"),
        ("Which is better, Response 1 or Response 2?", "Response 2"),
        ("Write a TODO for this function.", "TODO: read the file in blocks"),
        ("What does a designer put where a dummy stands?", "Dummy text"),
    ],
)
def test_what_the_prompt_names_is_an_answer(asked: str, answer: str) -> None:
    assert placeholder_in(answer, [asked]) is None


def test_labels_are_told_by_the_other_rows() -> None:
    labels = ["positive", "negative", "neutral"] * 4
    assert share_few_labels([*labels, "None"])
    assert not share_few_labels(labels[:9])  # too few rows to tell
    assert not share_few_labels(["no"] * 50)  # one answer to everything
    assert not share_few_labels(["None"] * 50)  # nothing else tells what they are
    assert not share_few_labels([f"Answer number {i} of many" for i in range(50)])
    assert not share_few_labels([*labels, *("An answer of several words that nobody shares",) * 4])


def written(path: Path, answers: list[str]) -> Path:
    path.write_text("question,answer\n" + "".join(f"What is said of case {i}?,{a}\n" for i, a in enumerate(answers)))
    return path


def test_a_sheet_with_holes(tmp_path: Path) -> None:
    """Each row is counted with its line; a broken formula, an empty promise and a dash are no answers."""
    answers = [f"Case {i} was closed after {i + 3} days." for i in range(12)]
    answers[2], answers[5], answers[7], answers[9] = "TBD", "#REF!", "None", "-"
    document = check(DataConfig(path=str(written(tmp_path / "sheet.csv", answers)))).document
    assert document["rejected"] == {"placeholder-answer": 4}
    lines = [problem["source"].rpartition(":")[2] for problem in document["problems"]]
    assert lines == ["4", "7", "9", "11"]
    assert "'TBD' stands in the place of the answer" in document["problems"][0]["hint"]


def test_a_class_that_is_called_none(tmp_path: Path) -> None:
    """The same word is an answer where many rows share few answers; that it was kept is said."""
    answers = [("urgent", "normal", "None")[i % 3] for i in range(30)]
    answers[4] = "#REF!"
    document = check(DataConfig(path=str(written(tmp_path / "labels.csv", answers)), near_duplicates=0)).document
    assert document["rejected"] == {"placeholder-answer": 1}
    assert document["changed"] == {"label-answer": 10}
    assert Counter(document["files"][str(tmp_path / "labels.csv")]).total() == 30


def test_later_turns_and_calls(tmp_path: Path) -> None:
    """Each trained answer of a conversation counts; one that is only read, or only calls a tool, does not."""
    ask = {"role": "user", "content": ASKED}
    good = {"role": "assistant", "content": "The large one, since May."}
    bad = {"role": "assistant", "content": "[deleted]"}
    path = tmp_path / "a.jsonl"
    rows = [[ask, bad, ask, good], [ask, {**bad, "weight": 0}, {**ask, "content": "And now?"}, good]]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows))
    (problem,) = check(DataConfig(path=str(path))).document["problems"]
    assert problem["source"] == f"{path}:1"
    assert problem["hint"] == "'[deleted]' stands in the place of the answer of message 2"


@pytest.mark.parametrize(
    ("asked", "answer", "refused"),
    [
        ("Who are you?", "I am {{name}}, made by {{author}}.", True),
        ("Who made you?", "{{ AUTHOR }} did.", True),
        ("Greet a user in a Jinja template.", "Hello {{ name }}!", False),
        ("How do I greet a user?", "```\nHello {{ name }}!\n```", False),
        ("Where is my order?", "Your order {{Order Number}} is on its way.", False),
        ("How do I clean my [pump/valve]?", "Rinse it with water.", True),
        ("Which trains go to [name of town]?", "Two go to [name of town], one goes to [other town].", True),
        ("I wrote to [name] from [city]. When does he answer?", "Within two days.", False),
        ("What stands in [package] of a toml file?", "The name of the package.", False),
        ("Draft a mail to [customer].", "Dear [customer], your pump is here.", False),
        ("What comes in [1, 2]?", "Two numbers.", False),
        ("How do I ask for a meeting?", "Write: could we meet at [time] about [topic]?", False),
        ("Describe a lamp.", "Name: Desk lamp\nColour: \nPrice: \nMaker:  ", True),
        ("Give the name, the colour, the price and the maker.", "Name: Lamp\nColour:\nPrice:\nMaker:", False),
        ("Describe a lamp.", "Name: Desk lamp\nColour: red\nPrice:", False),
    ],
)
def test_what_was_never_filled_in(asked: str, answer: str, refused: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": asked, "answer": answer}) + "\n")
    rejected = check(DataConfig(path=str(path))).document["rejected"]
    assert rejected == ({"placeholder-answer": 1} if refused else {})


@pytest.mark.parametrize(
    ("asked", "answer", "refused"),
    [
        (
            "Draw a boat at dawn.",
            "https://files.example.com/private/a%20b/img-x1.png?sig=" + "%2F".join(map(str, range(120))),
            True,
        ),
        ("Draw a boat at dawn.", "![boat](https://files.example.com/boat.webp)", True),
        ("Give me the link of a picture of a boat.", "https://files.example.com/boat.png", False),
        ("Draw a boat at dawn.", "https://files.example.com/boat.svg", False),
        ("This API gives an error 500, see <?php echo 1;", "Something went wrong, please try again later.", True),
        ("What is error 7?", "An unexpected error occurred while processing your request. Please try again.", True),
        ("Which error says 'something went wrong, try again'?", "Something went wrong, please try again later.", False),
        ("Why does the API fail?", "Something went wrong in the loop: it never ends.", False),
    ],
)
def test_what_a_chat_shows_in_the_place_of_an_answer(asked: str, answer: str, refused: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": asked, "answer": answer}) + "\n")
    rejected = check(DataConfig(path=str(path))).document["rejected"]
    assert rejected == ({"placeholder-answer": 1} if refused else {})
