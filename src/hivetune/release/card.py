"""README.md of an exported folder: what it is, what it was trained on, how it was judged, and what is not known of it.

Nothing in it names this machine. The front matter is what the Hugging Face Hub reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.base.disk import read_json
from hivetune.models.prepared import DESCRIPTION, spoken_name
from hivetune.run.folder import RECORD, VERDICT

CARD = "README.md"
_DEFAULTS = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty")


def portable_base(model: Path) -> tuple[str, str | None]:
    """What others call the base: Hub id and commit, else its name without a path.

    A description that lacks the rest of a prepared model's keys will do: an export needs none of them.
    """
    described = read_json(model / DESCRIPTION)
    if described.get("kind") == "hub":
        return described["source"], described.get("revision")
    return spoken_name(model), None


def write_card(work: Path, name: str, model: Path, run: Path | None, to: str) -> None:
    """`work/README.md`. `run`: the finished run that the adapter is of, None for any other adapter."""
    base, revision = portable_base(model)
    front: dict[str, Any] = {"base_model": base, "library_name": "peft" if to == "adapter" else "transformers"}
    front |= {"pipeline_tag": "text-generation", "tags": ["hivetune", "lora"]}
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", "", f"# {name}", ""]
    lines += [f"A low-rank adapter of {base}{f' at {revision}' if revision else ''}, {_form(to)}.", ""]
    lines += ["## Data", "", *_data(run), "", "## Judged", "", *_judged(run), "", "## Generation", ""]
    lines += [*_generation(model), "", "## Limits", ""]
    lines += [
        "- It was trained to answer what its rows ask; nothing is known of other questions, languages or longer texts.",
        "- What the base model gets wrong, it may get wrong too.",
        "",
        "## Licence",
        "",
        f"The licence of {base} holds for what is derived from it; the rows' owners may set further terms.",
    ]
    (work / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _form(to: str) -> str:
    return {
        "adapter": "for PEFT, beside its base",
        "merged": "merged into it",
        "gguf-adapter": "as GGUF, beside its base",
    }.get(to, "merged into it, as GGUF")


def _data(run: Path | None) -> list[str]:
    rows: Mapping[str, Any] = {} if run is None else (read_json(run / RECORD).get("result") or {}).get("rows", {})
    counts = [f"- {key.replace('_', ' ')}: {value:,} rows" for key, value in rows.items() if isinstance(value, int)]
    counts += [
        f"- {key.replace('_', ' ')}: {sum(value.values()):,} rows"
        for key, value in rows.items()
        if isinstance(value, Mapping)
    ]
    return counts or ["Not known."]


def _judged(run: Path | None) -> list[str]:
    if run is None or not (run / VERDICT).is_file():
        return ["Not judged when it was exported."]
    verdict = read_json(run / VERDICT)
    return [f"Verdict: {verdict['verdict']}.", "", *(f"- {reason}" for reason in verdict.get("reasons", []))]


def _generation(model: Path) -> list[str]:
    path = model / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    known = [f"- {key}: {settings[key]}" for key in _DEFAULTS if settings.get(key) is not None]
    return ["Judged greedy (temperature 0). The base's own defaults:", "", *(known or ["- none"])]
