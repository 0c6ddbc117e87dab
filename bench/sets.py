"""The benchmark's rows, made from Python's own documentation strings: token ids and loss masks in one JSON file a set.

    agents     three agents' system prompts, about 120 tokens a row, half of them a shared system prompt
    plain      the same conversations without a system prompt
    long       1,024 tokens a row, nothing shared
    prefix     a common prompt of 500 tokens before each conversation

Everyone who is measured reads the same file; its SHA-256 stands in the results.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hivetune.demo import SYSTEM_PROMPTS

SETS = ("agents", "plain", "long", "prefix")
LONG_TOKENS, PREFIX_TOKENS = 1024, 500
MIN_CHARS, MAX_CHARS = 40, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a prepared model folder")
    parser.add_argument("out", type=Path, help="folder for SET.json")
    parser.add_argument("--rows", type=int, default=1500)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        path = arguments.out / f"{name}.json"
        path.write_text(json.dumps(make_set(name, arguments.model, arguments.rows)))
        rows = json.loads(path.read_text())["rows"]
        tokens, trained = sum(len(row["tokens"]) for row in rows), sum(sum(row["trained"]) for row in rows)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{name}: {len(rows)} rows, {tokens / len(rows):.0f} tokens, {trained / len(rows):.0f} trained, {digest}")


def make_set(name: str, model: Path, count: int) -> dict[str, Any]:
    """{"name", "rows": [{"tokens", "trained"}]}; begins again when there are fewer conversations than `count`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    talks = sorted(_talks(), key=lambda talk: hashlib.sha256(talk["task"].encode()).digest())
    if name == "long":
        return {"name": name, "rows": _long_rows(tokenizer, talks, max(8, count // 8))}
    common = tokenizer.decode(tokenizer.encode(" ".join(t["output"] for t in talks))[: PREFIX_TOKENS - 8])
    agents = list(SYSTEM_PROMPTS.values())
    rows = []
    for number in range(count):
        system = {"agents": agents[number % len(agents)], "prefix": common}.get(name)
        rows.append(_row(tokenizer, system, talks[number % len(talks)]))
    return {"name": name, "rows": rows}


def _talks() -> Iterator[dict[str, str]]:
    """A question for each documented function and class of the standard library; the answer is its documentation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-su-z]*/*.py")):
        if "packages" in path.parent.name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            text = " ".join((ast.get_docstring(node) or "").split())
            if MIN_CHARS <= len(text) <= MAX_CHARS:
                yield {"task": f"What does {node.name} in {path.stem} do?", "output": text}


def _row(tokenizer: Any, system: str | None, talk: dict[str, str]) -> dict[str, list[int]]:
    """ChatML as SmolLM2 and Qwen use it, without the default system prompt that their templates add."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    head += f"<|im_start|>user\n{talk['task']}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(head, add_special_tokens=False)
    answer = tokenizer.encode(f"{talk['output']}<|im_end|>", add_special_tokens=False)
    return {"tokens": prompt + answer, "trained": [0] * len(prompt) + [1] * len(answer)}


def _long_rows(tokenizer: Any, talks: list[dict[str, str]], count: int) -> list[dict[str, list[int]]]:
    """Many turns in one conversation, cut at 1,024 tokens; every answer is trained."""
    rows, at = [], 0
    for _ in range(count):
        tokens: list[int] = []
        trained: list[int] = []
        while len(tokens) < LONG_TOKENS:
            row = _row(tokenizer, None, talks[at % len(talks)])
            tokens, trained, at = tokens + row["tokens"], trained + row["trained"], at + 1
        rows.append({"tokens": tokens[:LONG_TOKENS], "trained": trained[:LONG_TOKENS]})
    return rows


if __name__ == "__main__":
    main()
