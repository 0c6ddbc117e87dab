"""The benchmark's one pre-tokenised file: chats made from Python's documentation strings, as ids and masks.

Four sets. `short`: single questions, no system prompt, about 130 tokens. `agents`: rows as a team's log has them, half
of each the system prompt of one of three agents. `long`: conversations of 1,024 tokens. `prefix`: short questions
behind one common text of 500 tokens. The chats are written in ChatML by hand, so that no template adds a system prompt
of its own.
"""

import ast
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hivetune.synth.demo import SYSTEM_PROMPTS

MODULES = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "http",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)
LONG_TOKENS, PREFIX_TOKENS = 1024, 500


@dataclass(frozen=True)
class Set:
    """`batch`: documents of a step; `micro`: of a peer's micro-batch; `least`, `most`: characters of an answer."""

    name: str
    batch: int
    micro: int
    least: int
    most: int
    title: str


SETS = (
    Set("short", 8, 2, 200, 1100, "short chats, no common prefix"),
    Set("agents", 8, 2, 40, 260, "short chats of three agents with system prompts"),
    Set("long", 2, 2, 200, 1100, "conversations of 1,024 tokens"),
    Set("prefix", 4, 2, 60, 400, "short chats behind a common text of 500 tokens"),
)


def write_rows(path: Path, tokenizer_file: Path, steps: int) -> dict[str, Any]:
    """The file, and what is in it: for each set tokens, trained tokens and mean length. The same on every call."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    questions = list(_questions())
    sets: dict[str, Any] = {}
    for chosen in SETS:
        fitting = [pair for pair in questions if chosen.least <= len(pair[1]) <= chosen.most]
        documents = _documents(chosen, tokenizer, fitting)
        grouped = [[next(documents) for _ in range(chosen.batch)] for _ in range(steps)]
        sets[chosen.name] = {"micro": chosen.micro, "steps": grouped}
    text = json.dumps({"sets": sets})
    path.write_text(text)
    described = {name: _describe(content["steps"]) for name, content in sets.items()}
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "sets": described}


def write_random_rows(path: Path, vocabulary: int, steps: int) -> dict[str, Any]:
    """Write the set `agents` of random ids, for models with random weights and no tokenizer: 60 common tokens, 90 of a
    row's own, the last 60 trained. Return what is in it, as `write_rows`."""
    chosen = next(each for each in SETS if each.name == "agents")
    draw = random.Random(3)
    common = [draw.randrange(5, vocabulary) for _ in range(60)]
    trained = [0] * 90 + [1] * 60
    grouped = [
        [
            {"tokens": common + [draw.randrange(5, vocabulary) for _ in range(90)], "trained": trained}
            for _ in range(chosen.batch)
        ]
        for _ in range(steps)
    ]
    text = json.dumps({"sets": {chosen.name: {"micro": chosen.micro, "steps": grouped}}})
    path.write_text(text)
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "sets": {chosen.name: _describe(grouped)}}


def _documents(chosen: Set, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> Iterator[dict[str, list[int]]]:
    agents = list(SYSTEM_PROMPTS.values())
    prefix = _prefix(tokenizer, pairs)
    conversation: list[tuple[str, str]] = []
    for number, (question, answer) in enumerate(pairs):
        if chosen.name == "long":
            conversation.append((question, answer))
            document = _encode(tokenizer, "", conversation)
            if len(document["tokens"]) >= LONG_TOKENS:
                yield {key: values[:LONG_TOKENS] for key, values in document.items()}
                conversation = []
        elif chosen.name == "short":
            yield _encode(tokenizer, "", [(question, answer)])
        elif chosen.name == "agents":
            yield _encode(tokenizer, agents[number % len(agents)], [(question, answer)])
        else:
            yield _encode(tokenizer, prefix, [(question, answer)])


def _encode(tokenizer: Tokenizer, system: str, turns: Sequence[tuple[str, str]]) -> dict[str, list[int]]:
    """Ids, and 1 for each token of an answer and its end."""
    tokens: list[int] = []
    trained: list[int] = []

    def add(text: str, weight: int) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens.extend(ids)
        trained.extend([weight] * len(ids))

    if system:
        add(f"<|im_start|>system\n{system}<|im_end|>\n", 0)
    for question, answer in turns:
        add(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", 0)
        add(f"{answer}<|im_end|>", 1)
        add("\n", 0)
    return {"tokens": tokens, "trained": trained}


def _prefix(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> str:
    """A text of about PREFIX_TOKENS tokens: a handbook made of the last questions."""
    text = "Answer from this handbook.\n"
    for question, answer in reversed(pairs):
        longer = f"{text}\n{question}\n{answer}\n"
        if len(tokenizer.encode(longer).ids) > PREFIX_TOKENS:
            return text
        text = longer
    return text


def _questions() -> Iterator[tuple[str, str]]:
    """Questions about the standard library in a mixed but fixed order, answered by its own words."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = set()
    for path in sorted(root.glob("*.py")) + [p for name in MODULES for p in sorted((root / name).rglob("*.py"))]:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node)
                if text:
                    found.add((f"What does {path.stem}.{node.name} do?", text))
    return iter(sorted(found, key=lambda pair: hashlib.sha256("\n".join(pair).encode()).digest()))


def _describe(steps: Sequence[Sequence[dict[str, list[int]]]]) -> dict[str, Any]:
    documents = [document for step in steps for document in step]
    tokens = sum(len(document["tokens"]) for document in documents)
    return {
        "steps": len(steps),
        "documents_per_step": len(steps[0]),
        "mean_tokens": tokens / len(documents),
        "trained_share": sum(sum(document["trained"]) for document in documents) / tokens,
    }
