"""Duplicates for people: each row that was dropped beside the row that stays, with places, texts and their share."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, Any

from hivetune.data.fates import DUPLICATE, DUPLICATES, Decisions, RowLookup

SHOWN = 5  # of each kind, in the report
QUERY = "SELECT source, session, user, interaction_id, messages FROM rows JOIN bodies USING (n) WHERE n = ?"


def iter_dropped(
    results: Sequence[Path], decisions: Decisions, kinds: Sequence[int] = tuple(DUPLICATES)
) -> Iterator[dict[str, Any]]:
    """One dropped row after the other, in input order: kind, places, whose it was, share of words in common, texts.

    `share`: the smaller one of question and answer; None for what is equal.
    """
    with (
        closing(RowLookup(results, decisions, QUERY)) as rows,
        closing(RowLookup(results, decisions, QUERY)) as originals,
    ):
        for row, fate in enumerate(decisions.fate):
            if fate in kinds:
                source, session, user, identity, text = rows.find(row)
                first, *_, first_text = originals.find(decisions.original(row))
                share = decisions.shares.get(row)
                yield {
                    "kind": DUPLICATES[fate],
                    "source": source,
                    "same_as": first,
                    "share": None if share is None else round(share, 3),
                    "session": session,
                    "user": user,
                    "interaction_id": identity,
                    "messages": json.loads(text),
                    "same_as_messages": json.loads(first_text),
                }


def duplicate_examples(results: Sequence[Path], decisions: Decisions) -> list[dict[str, Any]]:
    """The first few of each kind, as the report has them."""
    kept = ("kind", "source", "same_as", "share", "messages", "same_as_messages")
    return [
        {name: pair[name] for name in kept}
        for kind in DUPLICATES
        for pair in islice(iter_dropped(results, decisions, (kind,)), SHOWN)
    ]


def write_dropped(results: Sequence[Path], decisions: Decisions, file: IO[bytes]) -> None:
    """All of them as JSON Lines; of exact copies only the places, since the row that stays has their text."""
    for pair in iter_dropped(results, decisions):
        if pair["kind"] == DUPLICATES[DUPLICATE]:
            del pair["messages"], pair["same_as_messages"]
        file.write(json.dumps(pair, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
