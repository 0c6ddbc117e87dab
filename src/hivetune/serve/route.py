"""The routing: the releases that should be served, and the one that a request's `model` means. Both come from the
registry.

One base model is served with its adapters: for each name the champion, the previous champion and the candidate.
"""

import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import home
from hivetune.errors import HivetuneError, MachineNotFit, NotThere, UsageError
from hivetune.release.registry import Release, champion_versions, find, gguf_adapter, releases

BASE = "base"
# As every evaluation asks: judge/worker.
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
_LOADED_ALIASES = frozenset(("champion", "previous", "candidate"))


class Withdrawn(UsageError):
    """Raised for a request that names a version which was rolled back, or a name that was retired."""


def gateway_folder() -> Path:
    """Return the folder that the running gateway has locked."""
    return home() / "gateway"


@dataclass(frozen=True)
class Deployment:
    """The models that a model server has loaded: a base, by name and hash of its prepared folder, and its adapters in
    order, as label NAME@VERSION -> GGUF file. `required`: labels that every server must have loaded."""

    model: str
    model_sha256: str
    served: Mapping[str, Path]
    # The release before the champion is loaded, and is no reason to start another server: so a rollback restarts
    # nothing.
    required: frozenset[str] = frozenset()
    device: str = ""  # as in ServerSettings

    def holds(self, wanted: "Deployment") -> bool:
        """Return whether a server with this content can serve everything in `wanted`; it may have more loaded."""
        same = (self.model, self.model_sha256, self.device) == (wanted.model, wanted.model_sha256, wanted.device)
        return same and all(self.served.get(label) == wanted.served[label] for label in wanted.required)


@dataclass(frozen=True)
class Domain:
    """A release name that answers the requests of one agent or category."""

    name: str
    by: str  # agent or category
    value: str
    # The system prompt of most of its rows, which also declares it.
    system: str | None = None


@dataclass(frozen=True)
class Wanted:
    """The releases that should be served; if `deployment` is None, nothing is served."""

    deployment: Deployment | None = None
    # By name; the champions that are domains of others' names, too.
    champions: dict[str, str] = field(default_factory=dict)
    candidates: dict[str, str] = field(default_factory=dict)
    domains: dict[str, tuple[Domain, ...]] = field(default_factory=dict)
    # Labels that the gate passed: of these a candidate may answer a share of the sessions.
    passed: set[str] = field(default_factory=set)
    # The settings that each release was judged with.
    generation: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # Of a label, or a name whose champion it is, the error and the words that a request for it gets.
    refused: dict[str, tuple[type[HivetuneError], str]] = field(default_factory=dict)
    # The card that a run trains on, which no model server may keep.
    taken: str = ""

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(self.deployment.served if self.deployment else ())

    @property
    def problems(self) -> list[str]:
        """Return, in words, each release that should be served and can't be, with the reason."""
        found = ((label, reason) for label, (kind, reason) in self.refused.items() if kind is MachineNotFit)
        return [f"{label} {reason}" for label, reason in found if "@" in label]


def wanted(database: sqlite3.Connection, names: Sequence[str] = ()) -> Wanted:
    """Return the releases that should be served, by the registry: of `names` and their domains, or of all names.

    A release that is damaged, has no GGUF adapter or has another base than the first name's champion is left out and
    listed in `refused`. Raises UsageError for a version, and for a name that is not registered.
    """
    for name in names:
        bare, at, _ = name.partition("@")
        if at:
            hint = f"serve {bare}, and ask for the model {name}"
            raise UsageError(f"{name}: give the name alone, since the gateway serves all of its versions", hint=hint)
        find(database, name)
    found, base, served = Wanted(), ("", ""), dict[str, Path]()
    champions = champion_versions(database)
    for release in releases(database):
        if release.name not in champions and release.moves and release.moves[-1].action == "retired":
            reason = f"was retired: {release.moves[-1].reason}"
            found.refused.update(dict.fromkeys((release.label, release.name), (Withdrawn, reason)))
    for name, version in sorted(champions.items()):
        all_releases = releases(database, name)
        # What should answer; the one before it does where it can't be served.
        champion = next(release for release in all_releases if release.version == version)
        domain = champion.proof.get("domain")
        if names and name not in names and (domain is None or domain["of"] not in names):
            continue
        base = base if served else (champion.model, champion.model_sha256)
        usable: dict[str, str] = {}  # alias -> label
        for release in all_releases:
            label = release.label
            if release.withdrawn:
                reason = f"was rolled back: {release.withdrawn}; ask for {name}, its champion"
                found.refused[label] = (Withdrawn, reason)
            elif _LOADED_ALIASES & set(release.aliases) and not release.pruned:
                try:
                    served[label] = adapter_of(release, base)
                except HivetuneError as error:
                    refused = (label, name) if release == champion else (label,)
                    found.refused.update(dict.fromkeys(refused, (MachineNotFit, f"can't be served: {error.message}")))
                    continue
                usable |= dict.fromkeys(release.aliases, label)
                found.generation[label] = release.proof.get("generation", GREEDY)
                found.passed.update({label} if release.verdict == "deploy" else ())
        answering = usable.get("champion") or usable.get("previous")
        if answering is not None:
            found.champions[name] = answering
            found.refused.pop(name, None)
        if answering is not None and domain is not None:
            system = champion.proof.get("generation", {}).get("system")
            own = Domain(name, domain["by"], domain["value"], system)
            found.domains[domain["of"]] = (*found.domains.get(domain["of"], ()), own)
        if "candidate" in usable:
            found.candidates[name] = usable["candidate"]
    if not served:
        return found
    required = frozenset({*found.champions.values(), *found.candidates.values()})
    return replace(found, deployment=Deployment(*base, dict(sorted(served.items())), required))


def adapter_of(release: Release, base: tuple[str, str] | None = None) -> Path:
    """Return the release's adapter as GGUF. Raises HivetuneError when it is damaged, UsageError when it has none or
    has another base than `base`, by name and hash."""
    if base not in (None, (release.model, release.model_sha256)):
        raise UsageError(f"its base is {release.model}, and a gateway serves one base: start another gateway for it")
    # Its files are hashed again only when one changed.
    release.check()
    return gguf_adapter(release)


@dataclass(frozen=True)
class Routes:
    """The names that a request's `model` may have, and the release of each."""

    wanted: Wanted = field(default_factory=Wanted)
    # The base that is loaded, or "".
    base: str = ""
    labels: frozenset[str] = frozenset()  # NAME@VERSION of the loaded releases
    # NAME -> label of the one that answers now.
    champions: Mapping[str, str] = field(default_factory=dict)
    # The share of a name's sessions that its candidate answers, 0 to 1.
    canary: float = 0.0
    problems: Sequence[str] = ()  # why something is not loaded

    def names(self) -> list[str]:
        """Return all valid values of `model`, champions first."""
        return [*sorted(self.champions), *sorted(self.labels), *([BASE] if self.base else [])]

    def find(self, model: str, session: str, declared: Mapping[str, str] | None = None) -> str:
        """Return the label of the release for a request's `model`, or `BASE`. `model` is NAME, NAME@VERSION,
        NAME@champion, NAME@candidate, `base`, or empty when one name is served. `declared`: agent, category and system
        prompt of the request, which may have a release of their own. Equal requests in the same state get the same
        release.

        Raises Withdrawn, MachineNotFit for a release that is not loaded yet, and NotThere with the served names.
        """
        if not model:
            domains = {domain.name for group in self.wanted.domains.values() for domain in group}
            names = self.champions.keys() - domains
            model = names.pop() if len(names) == 1 else ""
        self._refuse_unloaded(model)
        name, _, which = model.partition("@")
        by_alias = {"candidate": self.wanted.candidates, "champion": self.champions}
        if which:
            label = by_alias[which].get(name) if which in by_alias else model
        else:
            label = self._champion_or_canary(self._domain(name, declared or {}), session)
        # A release precedes a base model of the same name.
        if label in self.labels:
            return str(label)
        if model in (BASE, self.base):
            return BASE
        hint = f"served are: {', '.join(self.names())}"
        if name in self.champions and which.isdecimal():
            hint += f"; another version is loaded when it is promoted: hivetune promote {model}"
        raise NotThere(f"the model {model!r} is not served", hint=hint)

    def _champion_or_canary(self, name: str, session: str) -> str | None:
        candidate = self.wanted.candidates.get(name)
        # A number from 0 to 1 that depends on the session only, so that a session stays with its release.
        digest = hashlib.blake2b(f"{name}\0{session}".encode(), digest_size=8).digest()
        share = int.from_bytes(digest, "big") / 2**64
        if candidate in self.wanted.passed & self.labels and share < self.canary:
            return candidate
        return self.champions.get(name)

    def _domain(self, name: str, declared: Mapping[str, str]) -> str:
        """Return the name of the domain that a request declares by its agent, category or system prompt; else
        `name`.
        """
        domains = [domain for domain in self.wanted.domains.get(name, ()) if domain.name in self.champions]
        for domain in domains:
            if declared.get(domain.by) == domain.value:
                return domain.name
        if any(domain.by in declared for domain in domains):
            return name  # it declared another one
        # A prompt that the shared release was trained with too, or that two domains have, tells nothing.
        shared = self.wanted.generation.get(self.champions.get(name, ""), {}).get("system")
        system = declared.get("system")
        same = [domain for domain in domains if system and domain.system == system != shared]
        return same[0].name if len(same) == 1 else name

    def _refuse_unloaded(self, model: str) -> None:
        named = model.partition("@champion")[0]
        loaded = self.labels | self.champions.keys()
        kind, reason = self.wanted.refused.get(named, (None, ""))
        # What is damaged on the disk may still be loaded; what was withdrawn answers nobody.
        # A base outlives a retired release of its name.
        is_refused = named != self.base if kind is Withdrawn else named not in loaded
        if kind is not None and is_refused:
            raise kind(f"{model} {reason}")
        if not self.base or named in (self.wanted.labels | self.wanted.champions.keys()) - loaded:
            problems = "; ".join(self.problems)
            hint = "fix the named problem; the gateway retries by itself" if problems else "try again in a few seconds"
            raise MachineNotFit(f"{model or 'the model'} is not loaded{problems and ': '}{problems}", hint=hint)
