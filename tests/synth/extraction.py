"""What a page names, taken from its bytes by other means than the maker's: to prove that rows name nothing else."""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAMED = re.compile(r"(?:^|(?<=[\s`'\"(\[{=,|]))(-{1,2}[A-Za-z?#@][A-Za-z0-9_.-]*)")


def plain_source(path: Path) -> str:
    """The text of a page's source with fonts and escapes taken out by blunt replacement; no structure is read."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = data.decode("utf-8", "replace")
    text = re.sub(r"\\f(?:\[[^\]]*\]|\(..|.)|\\[&,/|^%:]|\\s[-+]?\d", "", text)
    text = text.replace("\\\\-", "-").replace("\\-", "-").replace("\\(hy", "-").replace("\\[hy]", "-")
    text = text.replace("\\*=", "--")  # a string that patch(1) defines
    text = re.sub(r"^\.\s*(?:Fl|[BIR]{2} -) +", "-", text, flags=re.MULTILINE)  # `.BI \- SIGNAL` is -SIGNAL
    return re.sub(r"\bFl +(?=[A-Za-z0-9?-])", "-", text)


def options_named(text: str) -> set[str]:
    return {found.rstrip(".-_") or found for found in NAMED.findall(text)}


def answers(row: Mapping[str, Any]) -> str:
    return "\n".join(message["content"] for message in row["messages"] if message["role"] == "assistant")


def options_without_source(row: Mapping[str, Any]) -> set[str]:
    """Options of the answers that no cited file has in its bytes."""
    source = "\n".join(plain_source(Path(one["file"])) for one in row["synth"]["sources"])
    return {option for option in options_named(answers(row)) if option not in source}


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
