"""The rows that are kept: new, not frozen, and written as lines of the file; the same for every maker."""

import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Any

from hivetune.data.prepare.split import group_hash, question
from hivetune.records import Message
from hivetune.synth.make.draft import Draft
from hivetune.synth.pool import Pool, draw_key
from hivetune.synth.verify.duplicates import SeenRows

CHECKS_PASSED = ("length", "language", "options", "paths", "units", "parses", "supported", "duplicates", "frozen")


class KeptRows:
    """Rows in the order in which they came, in the pool's file. `frozen`: hashes of questions that no row may ask."""

    def __init__(self, pool: Pool, frozen: Collection[int], maker: str, seed: int):
        self._pool, self._frozen, self._maker, self._seed = pool, frozen, maker, seed
        self._seen = SeenRows(pool.text)
        self._number = 0
        self.number_kept = 0

    def remember(self, against: Iterator[tuple[str, str]]) -> None:
        """Rows of the user as (source, text): none is made again."""
        for source, text in against:
            _, keys = self._seen.look(text)
            if keys:
                self._pool.keep(self._number, 0, source, "", text, None)
                self._seen.add(self._number, keys)
                self._number += 1

    def keep(self, category: str, page: str, path: str, draft: Draft) -> str | None:
        """The reason why a draft can't be kept; None when it is."""
        text = "\n".join(part for turn in draft.turns for part in turn)
        reason, keys = self._seen.look(text)
        if reason is None and self._is_frozen(draft):
            reason = "frozen-question"
        if reason is not None:
            return reason
        row = _row(category, page, path, draft, maker=self._maker, seed=self._seed)
        key = draw_key(self._seed, draft)
        self._pool.keep(self._number, key, category, draft.kind, text, json.dumps(row, ensure_ascii=False))
        self._seen.add(self._number, keys)
        self._number += 1
        self.number_kept += 1
        return None

    def _is_frozen(self, draft: Draft) -> bool:
        messages = [Message("user", draft.turns[0][0])]
        return group_hash(f"question:{question(messages)}") in self._frozen


def _row(category: str, page: str, path: str, draft: Draft, *, maker: str, seed: int) -> dict[str, Any]:
    """One line of the file. `session` is the page, so that a split keeps all questions on one page together."""
    messages = []
    for asked, answered in draft.turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    row: dict[str, Any] = {"messages": messages, "category": category, "session": f"synth {page}"}
    if draft.checker is not None:
        row["checker"] = dict(draft.checker)
    sources = ((page, draft.section, path),)
    row["synth"] = {
        "kind": draft.kind,
        "sources": [dict(zip(("page", "section", "file"), one, strict=True)) for one in sources],
        "passage_sha256": hashlib.sha256(draft.passage.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        "maker": maker,
        "seed": seed,
        "checks": list(CHECKS_PASSED),
    }
    if draft.absent:
        row["synth"]["absent"] = list(draft.absent)
    return row
