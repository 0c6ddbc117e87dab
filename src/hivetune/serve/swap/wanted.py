"""What should be loaded, what is loaded, and which release a request's `model` means.

All of it comes from the registry; nothing is started here. A base model has one deployment: its GGUF file and the
adapters that are served on it, in the order of their ids: of each name the champion, the one before it and the
candidate. `desired` in hive.db says what should be served.
"""

import contextlib
import hashlib
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, lock_holder, read_json, write_json
from hivetune.errors import HivetuneError, NotThere, UsageError
from hivetune.release.registry import Release, desired, find, gguf_adapter, releases

BASE = "base"
GREEDY: Mapping[str, Any] = {"temperature": 0.0}  # as every evaluation asks: judge/worker


@dataclass(frozen=True)
class ServedRelease:
    """A release that can be loaded: its label NAME@VERSION and its adapter as a GGUF file."""

    label: str
    adapter: Path
    size_bytes: int = 0  # which llama.cpp keeps in memory


@dataclass(frozen=True)
class Deployment:
    """The content of one model server: a base, by name and hash of its prepared folder, and its adapters by id.

    `required`: labels without which a server is not right. The release before the champion is loaded with them, and is
    no reason to start another server: so a rollback restarts nothing.
    """

    model: str
    model_sha256: str
    served: tuple[ServedRelease, ...]
    required: frozenset[str] = frozenset()
    device: str = ""  # as in ServerSettings

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(release.label for release in self.served)

    def holds(self, wanted: "Deployment") -> bool:
        """Return whether a server with this content is right for what is wanted."""
        same = (self.model, self.model_sha256, self.device) == (wanted.model, wanted.model_sha256, wanted.device)
        needed = {release for release in wanted.served if release.label in wanted.required}
        return same and needed <= set(self.served)


@dataclass(frozen=True)
class DesiredState:
    """All deployments, and for each name its champion and its candidate, if there is one. `problems`: what can't be
    served, in words. `taken`: the card that a run trains on, which no model server may keep. `generation`: the
    settings that each release was judged with. `withdrawn`: why each rolled back release was. `unserved`: why a label,
    or a name whose champion it is, can't be. `canaries`: the candidates that the gate passed."""

    deployments: tuple[Deployment, ...] = ()
    champions: dict[str, str] = field(default_factory=dict)
    candidates: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    taken: str = ""
    generation: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    withdrawn: dict[str, str] = field(default_factory=dict)
    unserved: dict[str, str] = field(default_factory=dict)
    canaries: frozenset[str] = frozenset()


class Checks:
    """The hashes of releases' files, compared with those registered, and again only when a file changed: the gateway
    asks four times a second, and adapters are large."""

    def __init__(self) -> None:
        self._checked: dict[str, tuple[list[tuple[str, int, int]], HivetuneError | None]] = {}

    def check(self, release: Release) -> None:
        """Raise what `release.check` raises."""
        try:
            identities = _identities(release.folder)
        except FileNotFoundError:  # what came later is just added: one rename, and the folder is there again
            identities = _identities(release.folder)
        remembered = self._checked.get(release.label)
        if remembered is None or remembered[0] != identities:
            problem = None
            try:
                release.check()
            except HivetuneError as error:
                problem = error
            remembered = self._checked[release.label] = (identities, problem)
        if remembered[1] is not None:
            raise remembered[1]


def _identities(folder: Path) -> list[tuple[str, int, int]]:
    """Return what changes whenever a file of the folder does. Raises FileNotFoundError when one disappears."""
    files = ((path, path.stat()) for path in sorted(folder.rglob("*")))
    # The time of the inode too: nobody can set that back.
    return [(str(path), status.st_size, status.st_mtime_ns + status.st_ctime_ns) for path, status in files]


def wanted(database: sqlite3.Connection, names: Sequence[str] = (), checks: Checks | None = None) -> DesiredState:
    """Read from the registry what should be served, of `names` or of every name with a champion.

    A release that is damaged or has no GGUF adapter is left out and named in `problems`. A champion that can't be
    served is replaced by the previous one. Raises UsageError for a version, and a name that is not registered or has
    no champion.
    """
    checks = checks or Checks()
    for name in names:
        if "@" in name:
            bare = name.partition("@")[0]
            raise UsageError(
                f"{name}: the gateway serves names with all their versions",
                hint=f"serve {bare}, and ask for the model {name}",
            )
        find(database, name)
    problems: list[str] = []
    served: dict[tuple[str, str], list[ServedRelease]] = {}
    required: set[str] = set()
    canaries: set[str] = set()
    champions, candidates, generation = {}, {}, {}
    withdrawn: dict[str, str] = {}
    unserved: dict[str, str] = {}
    for name, version in desired(database).items():
        if names and name not in names:
            continue
        all_releases = releases(database, name)
        withdrawn |= {release.label: release.withdrawn for release in all_releases if release.withdrawn}
        usable: list[Release] = []
        for release in all_releases:
            is_wanted = release.version == version or "previous" in release.aliases or "candidate" in release.aliases
            if not is_wanted or release.pruned or release.withdrawn:
                continue
            try:
                loadable = load_release(release, checks)
            except HivetuneError as error:
                problems.append(error.message)
                unserved[release.label] = error.message
                continue
            usable.append(release)
            generation[release.label] = release.proof.get("generation", GREEDY)
            served.setdefault((release.model, release.model_sha256), []).append(loadable)
        champion = next((release for release in usable if release.version == version), None)
        champion = champion or next((release for release in usable if "previous" in release.aliases), None)
        if champion is not None:
            champions[name] = champion.label
            required.add(champion.label)
        elif f"{name}@{version}" in unserved:
            unserved[name] = unserved[f"{name}@{version}"]
        candidate = next((release for release in usable if "candidate" in release.aliases), None)
        if candidate is not None:
            candidates[name] = candidate.label
            required.add(candidate.label)
            if candidate.verdict == "deploy":
                canaries.add(candidate.label)
    return DesiredState(
        tuple(
            Deployment(
                model,
                sha256,
                tuple(sorted(loaded, key=lambda release: release.label)),
                frozenset(required & {release.label for release in loaded}),
            )
            for (model, sha256), loaded in sorted(served.items())
        ),
        champions,
        candidates,
        tuple(problems),
        generation=generation,
        withdrawn=withdrawn,
        unserved=unserved,
        canaries=frozenset(canaries),
    )


def load_release(release: Release, checks: Checks | None = None) -> ServedRelease:
    """Return the release's adapter as GGUF. Raises HivetuneError when it is damaged, UsageError when it has none."""
    (checks or Checks()).check(release)
    adapter = gguf_adapter(release)
    return ServedRelease(release.label, adapter, adapter.stat().st_size)


class Withdrawn(UsageError):
    """The request names a version that was rolled back."""


@dataclass(frozen=True)
class Routes:
    """The models that a request can name. `bases`: names of the base models. `labels`: NAME@VERSION -> its base.
    `champions` and `candidates`: NAME -> label. `canary`: share of a name's sessions that its candidate answers, 0 to
    1, where the gate passed it (`canaries`). `withdrawn`: label -> why it was rolled back."""

    bases: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    champions: Mapping[str, str] = field(default_factory=dict)
    candidates: Mapping[str, str] = field(default_factory=dict)
    canary: float = 0.0
    withdrawn: Mapping[str, str] = field(default_factory=dict)
    canaries: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Route:
    """The base model, and the label of the release that answers on it. `adapted` is false for the base alone."""

    model: str
    label: str
    adapted: bool = True


def route(routes: Routes, model: str, session: str) -> Route:
    """Return the release for a request's `model`: NAME, NAME@VERSION, NAME@champion, NAME@candidate, `base`, or nothing
    when one name is served. The same request in the same state always gets the same one. A release precedes a base
    model of the same name. Raises Withdrawn, and NotThere naming what is served."""
    if not model and len(routes.champions) == 1:
        model = next(iter(routes.champions))
    if model in routes.withdrawn:
        name = model.partition("@")[0]
        raise Withdrawn(f"{model} was rolled back: {routes.withdrawn[model]}", hint=f"ask for {name}, its champion")
    name, _, which = model.partition("@")
    label = model if model in routes.labels else None
    if which in ("", "champion"):
        label = routes.champions.get(name)
        # A number from 0 to 1 that depends on the session only, so that a session stays with its release.
        share = int.from_bytes(hashlib.blake2b(f"{name}\0{session}".encode(), digest_size=8).digest(), "big") / 2**64
        candidate = routes.candidates.get(name)
        if not which and candidate in routes.canaries and share < routes.canary:
            label = candidate
    elif which == "candidate":
        label = routes.candidates.get(name)
    if label is not None:
        return Route(routes.labels[label], label)
    if model == BASE and len(routes.bases) == 1:
        model = routes.bases[0]
    if model in routes.bases:
        return Route(model, BASE if len(routes.bases) == 1 else model, adapted=False)
    hint = f"served are: {', '.join(served_names(routes))}"
    if name in routes.champions and which.isdecimal():
        hint += f"; another version is loaded when it is promoted: hivetune promote {model}"
    raise NotThere(f"the model {model!r} is not served", hint=hint)


def served_names(routes: Routes) -> list[str]:
    """Return everything that a request can name, champions first."""
    bases = [BASE] if len(routes.bases) == 1 else sorted(set(routes.bases) - routes.champions.keys())
    return [*sorted(routes.champions), *sorted(routes.labels), *bases]


# The gateway writes what it has loaded; the file counts only while the gateway runs.

_FILE = "loaded.json"


def gateway_folder() -> Path:
    """Return the folder whose lock is held by the running gateway."""
    return home() / "gateway"


def write_loaded(names: Sequence[str], labels: Collection[str]) -> None:
    """Write the models that can be requested now, of `names` or of every name. While the disk can't be written the old
    list stays, and its readers wait."""
    with contextlib.suppress(OSError):
        write_json(gateway_folder() / _FILE, {"schema": 1, "names": list(names), "loaded": sorted(labels)})


def loaded_labels(name: str) -> frozenset[str] | None:
    """Return the labels that the running gateway has loaded, or None while no gateway serves this name."""
    if lock_holder(gateway_folder()) is None:
        return None
    try:
        loaded = read_json(gateway_folder() / _FILE)
        return None if loaded["names"] and name not in loaded["names"] else frozenset(loaded["loaded"])
    except (OSError, ValueError, KeyError, TypeError):  # it has not told yet
        return frozenset()
