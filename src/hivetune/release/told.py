"""What a served file says of given tokens: llama.cpp is made to write them one after the other, and asked how likely
it found each.

A bias that no other token can outdo forces the next one; the log-probabilities that the server reports are those from
before the bias. The answer ends where llama.cpp says that the forced token was an end.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hivetune.errors import HivetuneError
from hivetune.llama.backend import Backend
from hivetune.process.protocol import Passage
from hivetune.release.prove import Saying

_BIAS = 1000.0  # nats: far above any logit


def tell_passages(
    backend: Backend, passages: Sequence[Passage], *, slots: int, top: int, adapter: int | None = None
) -> tuple[list[list[Saying | None]], list[bool]]:
    """For each passage: what is said at each of its places, and whether its last one ended the answer.

    `slots`: of the server; a passage stays in one, where its beginning is kept. `adapter`: with this one alone; None:
    with none. Raises HivetuneError for a server that is gone or says nothing.
    """
    scales = [{"id": lora["id"], "scale": float(lora["id"] == adapter)} for lora in backend.lora]

    def tell(number: int) -> list[tuple[Saying | None, bool]]:
        passage = passages[number]
        return [_tell(backend, passage, place, number % slots, top, scales) for place in passage.places]

    def tell_slot(slot: int) -> list[list[tuple[Saying | None, bool]]]:
        return [tell(number) for number in range(slot, len(passages), slots)]

    found: list[list[tuple[Saying | None, bool]]] = [[] for _ in passages]
    with ThreadPoolExecutor(slots) as pool:
        for slot, told in enumerate(pool.map(tell_slot, range(slots))):
            found[slot::slots] = told
    return [[told for told, _ in each] for each in found], [each[-1][1] for each in found]


def _tell(
    backend: Backend, passage: Passage, place: int, slot: int, top: int, scales: Sequence[dict[str, Any]]
) -> tuple[Saying | None, bool]:
    body = {
        "prompt": list(passage.tokens[:place]),
        "n_predict": 1,
        "temperature": 0,
        "n_probs": top,
        "logit_bias": [[passage.tokens[place], _BIAS]],
        "cache_prompt": True,  # of this slot alone: the one in host memory is off (backend.py)
        "id_slot": slot,
        "return_tokens": True,
    }
    document = backend.request("/completion", {**body, "lora": list(scales)} if scales else body)
    said: Any = document.get("completion_probabilities")
    ended = document.get("stop_type") == "eos"
    if not said:
        return None, ended
    try:
        likeliest = tuple((int(each["id"]), float(each["logprob"])) for each in said[0]["top_logprobs"])
        written, logprob = int(said[0]["id"]), float(said[0]["logprob"])
    except (TypeError, LookupError, ValueError):
        raise HivetuneError(f"llama.cpp reports no probabilities: {str(said)[:200]}") from None
    if written != passage.tokens[place]:
        raise HivetuneError(f"llama.cpp wrote the token {written} where {passage.tokens[place]} was forced")
    return Saying(logprob, likeliest), ended
