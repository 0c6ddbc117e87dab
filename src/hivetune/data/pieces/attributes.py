"""Attributes of spans: out of the ways in which exporters nest them, under names with dots and back to trees."""

from collections.abc import Mapping, Sequence
from typing import Any

from hivetune.data.pieces.said import listed, one_of


def attributes(value: Any) -> dict[str, Any]:
    """Attributes as OTLP writes them, a list of keys with typed values, or as an object."""
    if isinstance(value, dict):
        return value
    pairs = [pair for pair in listed(value) if isinstance(pair, dict) and isinstance(pair.get("key"), str)]
    return {pair["key"]: typed(pair.get("value")) for pair in pairs}


def typed(value: Any) -> Any:
    """A value of OTLP without the name of its type."""
    if not isinstance(value, dict):
        return value
    if "arrayValue" in value:
        return [typed(item) for item in listed(one_of(value["arrayValue"], "values"))]
    if "kvlistValue" in value:
        return attributes(one_of(value["kvlistValue"], "values"))
    return next(iter(value.values()), None)


def dotted(value: Mapping[str, Any], namespaces: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Attributes under names with dots, where an exporter nests those of `namespaces`."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        nests = isinstance(inner, dict) and name.partition(".")[0] in namespaces
        found |= dotted(inner, namespaces, f"{name}.") if nests else {name: inner}
    return found


def tree_below(flat: Mapping[str, Any], prefix: str) -> list[Any] | None:
    """The list whose parts have names that begin with `prefix`; None if there is none."""
    found = nested(flat, prefix)
    return found if isinstance(found, list) else None


def nested(flat: Mapping[str, Any], prefix: str) -> Any:
    """What stands below `prefix`, nested as the dots in the names say."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if not key.startswith(prefix):
            continue
        node = tree
        *path, last = key.removeprefix(prefix).split(".")
        for step in path:
            inner = node.setdefault(step, {})
            node = inner if isinstance(inner, dict) else node
        node[last] = value
    return _as_lists(tree)


def _as_lists(value: Any) -> Any:
    """Objects whose keys are 0, 1, 2 ... as lists."""
    if not isinstance(value, dict):
        return value
    if value and all(key.isdecimal() for key in value):
        return [_as_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _as_lists(item) for key, item in value.items()}
