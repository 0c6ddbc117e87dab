"""A judge model is asked which of two answers is better; its replies are kept like any side's answers."""

from collections.abc import Mapping
from typing import Any

from hivetune.config import EvalConfig
from hivetune.errors import UsageError
from hivetune.judge.measure.answers import ask_all, counter, kept_side
from hivetune.judge.measure.artefacts import find_artefact, open_artefact
from hivetune.judge.preferences import REPLY_TOKENS, contradictions, judgings, preference_rows
from hivetune.llama.backend import CONTEXT_TOKENS, ServerSettings
from hivetune.records import Progress
from hivetune.train.open import Run

JUDGE_CONTEXT_TOKENS = max(CONTEXT_TOKENS, 8192)  # a request, a reference and two answers


def judged(
    document: Mapping[str, Any], settings: EvalConfig, run: Run | None, quant: str, progress: Progress
) -> dict[str, Any]:
    """`preferences` of compare.json (docs/formats.md); nothing without `eval.judge`.

    Raises UsageError for a judge that is not there or can't be asked, HivetuneError when it fails half-way: its replies
    are kept and not asked again.
    """
    if settings.judge is None:
        return {}
    if any(document[side].get("recorded") for side in ("base", "tuned")):
        raise UsageError(
            "eval.judge: recorded figures have no answers that could be judged", hint="leave eval.judge out"
        )
    side = find_artefact(settings.judge, run, quant)
    if side.figures is not None:
        raise UsageError("eval.judge: a file of figures can't judge", hint="give a server's URL#MODEL or a .gguf file")
    pairs = judgings(document["answers"])
    prompts = [prompt for pair in pairs for prompt in pair.prompts]
    with kept_side(side, REPLY_TOKENS, settings.slots) as kept:
        left = [prompt for prompt in prompts if prompt.key not in kept.answers]
        if left:
            server = ServerSettings(slots=settings.slots, context_tokens=JUDGE_CONTEXT_TOKENS)
            with open_artefact(side, server) as (asked, _):
                on_answer = counter(progress, len(left))
                ask_all(asked, kept, prompts, slots=settings.slots, new_tokens=REPLY_TOKENS, on_answer=on_answer)
        said = {key: answer.text for key, answer in kept.answers.items()}
    replies = [(pair, said[pair.prompts[0].key], said[pair.prompts[1].key]) for pair in pairs]
    rows = preference_rows(document["answers"], replies)
    against_itself, asked_pairs = contradictions(rows)
    own = side.label in {document[name].get("label") for name in ("base", "tuned")}
    return {
        "preferences": {
            "judge": side.label,
            "judges_itself": own,
            "contradictions": against_itself,
            "asked": asked_pairs,
            "unreadable": sum(row["preferred"] is None for row in rows),
            "rows": rows,
        }
    }
