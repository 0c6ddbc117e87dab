"""The conversion of frozen dataclasses to plain JSON values and back."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def to_plain(value: Any) -> Any:
    """Return dataclasses as objects, paths as text, tuples as lists, sets as sorted lists, other values unchanged."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[_T], value: Any) -> _T:
    """Return a dataclass `kind` made from what `to_plain` returned; fields with a default may be missing.

    Raise ValueError that names an unknown, missing or wrong field.
    """
    read: _T = _read(kind, value, getattr(kind, "__name__", str(kind)))
    return read


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # `X | None`, the only union in use
        return None if value is None else _read(next(k for k in inner if k is not NoneType), value, where)
    if isinstance(value, _STORED_AS.get(origin, ())):
        return _read_many(origin, inner, value, where)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _read_record(kind, value, where)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if not _fits(origin or kind, inner, value):
        raise ValueError(f"{where}: {value!r} is not of the type {getattr(kind, '__name__', kind)}")
    return value


# Containers, and their types in JSON.
_STORED_AS: dict[Any, type] = {tuple: list, frozenset: list, Mapping: dict}


def _read_many(origin: Any, inner: tuple[Any, ...], value: Any, where: str) -> Any:
    if origin is Mapping:
        return {key: _read(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    kinds = inner if origin is tuple and inner[-1] is not Ellipsis else [inner[0]] * len(value)
    return origin(_read(item_kind, item, where) for item_kind, item in zip(kinds, value, strict=True))


def _fits(kind: Any, inner: tuple[Any, ...], value: Any) -> bool:
    if kind is Any:
        return True
    if kind is Literal:
        return value in inner
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _read_record(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    unknown = sorted(value.keys() - hints.keys())
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}")
    read = {name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    try:
        return kind(**read)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
