"""Which release a request means, where a name has experts; a session stays with whoever answered it first."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hivetune.routing.choose import Chosen, choose, plain_text, question_of
from hivetune.serve.swap.keeper import Keeper

REASON_HEADER = "X-Hivetune-Reason"
_AGENT_HEADER = "x-hivetune-agent"
MOST_REMEMBERED_SESSIONS = 10_000
SESSION_S = 3600.0  # since its last request: a session that comes back the next day is another conversation


@dataclass
class Sessions:
    """Who answered each session of a client, by the name that it asked for; the oldest is forgotten first."""

    _answered: OrderedDict[tuple[str, str], tuple[str, float]] = field(default_factory=OrderedDict)

    def find(self, model: str, session: str, now_s: float) -> str | None:
        known = self._answered.get((model, session))
        return known[0] if known is not None and now_s - known[1] < SESSION_S else None

    def keep(self, model: str, session: str, choice: Chosen, now_s: float) -> None:
        self._answered[model, session] = (choice.model, now_s)
        self._answered.move_to_end((model, session))
        if len(self._answered) > MOST_REMEMBERED_SESSIONS:
            self._answered.popitem(last=False)


def chosen(
    keeper: Keeper, sessions: Sessions, client: str, headers: Mapping[str, str], body: Mapping[str, Any]
) -> Chosen:
    """Who answers, of what is loaded now. Only sessions that the client names are remembered: all that one user asks in
    a year is no session. And only what text has chosen: a key that is declared is obeyed each time."""
    tables, routes = keeper.wanted.experts, keeper.routes
    question = question_of(body, headers.get(_AGENT_HEADER))
    family = keeper.wanted.family
    alone = routes.champions.keys() - family.keys()
    if not question.model and len(alone) == 1:
        question = replace(question, model=min(alone))
    named, now_s = session_of(headers, body), time.monotonic()
    session = f"{client}\0{named}" if named else None  # another client's session of this name is another session
    known = sessions.find(question.model, session, now_s) if session else None
    choice = choose(tables, family, question, routes.champions.keys() | routes.labels.keys(), known)
    if session and question.model in tables and choice.by in ("text", "session", "shared"):
        sessions.keep(question.model, session, choice, now_s)
    return choice


def keys_of_request(headers: Mapping[str, str], body: Mapping[str, Any]) -> Mapping[str, str]:
    """What a request declares of itself."""
    return question_of(body, headers.get(_AGENT_HEADER)).keys


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """X-Session-Id, else OpenAI's metadata.session_id."""
    metadata = body.get("metadata")
    own = metadata.get("session_id") if isinstance(metadata, dict) else None
    return headers.get("x-session-id") or plain_text(own)
