"""Which release answers a request. Pure: the same request in the same state always gets the same answer."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from hivetune.errors import NotThere, UsageError
from hivetune.serve.swap.wanted import BASE


class Withdrawn(UsageError):
    """A request for a version that was rolled back."""


@dataclass(frozen=True)
class Routes:
    """What can be asked for. `bases`: names of the base models; `labels`: NAME@VERSION -> its base; `champions` and
    `candidates`: NAME -> label. `canary`: share of a name's sessions that the candidate answers, 0 to 1. `withdrawn`:
    label -> why it was rolled back."""

    bases: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    champions: Mapping[str, str] = field(default_factory=dict)
    candidates: Mapping[str, str] = field(default_factory=dict)
    canary: float = 0.0
    withdrawn: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """The base model, and the label of the release that answers on it; `adapted` is false for the base alone."""

    model: str
    label: str
    adapted: bool = True


def route(routes: Routes, model: str, session: str) -> Route:
    """The release for a request's `model`: NAME, NAME@VERSION, NAME@champion, NAME@candidate, `base`, or nothing when
    one name is served. A release goes before a base model of the same name. Raises Withdrawn; NotThere naming what is
    served."""
    if not model and len(routes.champions) == 1:
        model = next(iter(routes.champions))
    if model in routes.withdrawn:
        name = model.partition("@")[0]
        raise Withdrawn(f"{model} was rolled back: {routes.withdrawn[model]}", hint=f"ask for {name}, its champion")
    name, _, which = model.partition("@")
    label = model if model in routes.labels else None
    if which in ("", "champion"):
        label = routes.champions.get(name)
        if not which and name in routes.candidates and _share(name, session) < routes.canary:
            label = routes.candidates[name]
    elif which == "candidate":
        label = routes.candidates.get(name)
    if label is not None:
        return Route(routes.labels[label], label)
    if model == BASE and len(routes.bases) == 1:
        model = routes.bases[0]
    if model in routes.bases:
        return Route(model, BASE if len(routes.bases) == 1 else model, adapted=False)
    raise NotThere(f"the model {model!r} is not served", hint=f"served are: {', '.join(served_names(routes))}")


def served_names(routes: Routes) -> list[str]:
    """Everything that a request can name, champions first."""
    bases = [BASE] if len(routes.bases) == 1 else sorted(set(routes.bases) - routes.champions.keys())
    return [*sorted(routes.champions), *sorted(routes.labels), *bases]


def _share(name: str, session: str) -> float:
    """A number from 0 to 1 that is the session's own: a session stays with the release that answered it."""
    digest = hashlib.blake2b(f"{name}\0{session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
