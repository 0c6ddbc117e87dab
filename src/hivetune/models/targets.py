"""The one matcher of `lora.target_modules`: which linear modules get an adapter, as PEFT understands the setting.

The plan, both implementations of the model and the adapter's files use it, so what one accepts the others accept.
"""

import re
from collections.abc import Iterable, Sequence

from hivetune.errors import UsageError

ALL_LINEAR = "all-linear"
PLAIN_NAME = re.compile(r"[\w.]+")


def match_targets(names: Iterable[str], targets: str | Sequence[str], *, head: str | None) -> list[str]:
    """Return the linear modules among `names` that get an adapter, in their order.

    wanted: "all-linear" (every linear module but `head`, the output embedding), a list of names (a whole module name,
    or its end after a dot), or a regular expression that matches the whole module name. A single plain name means a
    list of it. Source: PEFT, `LoraConfig.target_modules` and `check_target_module_exists`.

    Raises UsageError for a name or pattern that matches no module, for an empty list, an invalid pattern, and for
    `head`. The message names the modules that exist.
    """
    names = list(names)
    if is_all_linear(targets):
        return [name for name in names if name != head]
    chosen = find_targets(names, targets)
    if isinstance(targets, str) and not PLAIN_NAME.fullmatch(targets):
        unknown = [] if chosen else [targets]
    else:
        ends = [targets] if isinstance(targets, str) else list(targets)
        unknown = [end for end in ends if not any(_ends_with(name, end) for name in names)]
    if unknown or not chosen:
        existing = sorted({name.rpartition(".")[2] for name in names if name != head})
        fault = f"no linear module matches {', '.join(map(repr, unknown))}" if unknown else "the list is empty"
        raise UsageError(f"lora.target_modules: {fault}", hint=f"use {ALL_LINEAR}, or some of: {', '.join(existing)}")
    if head in chosen:
        raise UsageError(
            f"lora.target_modules: {head} is the output embedding; an adapter on it is unsupported",
            hint=f"leave it out, or use {ALL_LINEAR}",
        )
    return chosen


def find_targets(names: Sequence[str], targets: str | Sequence[str]) -> list[str]:
    """Return the modules that are meant, maybe none, without the refusals of `match_targets`."""
    if is_all_linear(targets):
        return list(names)
    if isinstance(targets, str) and not PLAIN_NAME.fullmatch(targets):
        try:
            return [name for name in names if re.fullmatch(targets, name)]
        except re.error as error:
            raise UsageError(
                f"lora.target_modules: {targets!r} is not a regular expression: {error}",
                hint="use all-linear, a list of names such as [q_proj, v_proj], or a pattern such as .*_proj",
            ) from None
    ends = [targets] if isinstance(targets, str) else list(targets)
    return [name for name in names if any(_ends_with(name, end) for end in ends)]


def is_all_linear(targets: str | Sequence[str]) -> bool:
    """Return whether all linear modules are meant. PEFT takes the word in any case."""
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def peft_targets(adapted: Iterable[str], targets: str | Sequence[str]) -> str | list[str]:
    """Return `target_modules` of an adapter_config.json, so that PEFT puts the adapters on the same modules as
    `adapted`.

    "all-linear" is written out as names: other programs (vLLM, llama.cpp's converter) read names only.
    """
    if is_all_linear(targets):
        return sorted({named_end(name) for name in adapted})
    if isinstance(targets, str):
        return [targets] if PLAIN_NAME.fullmatch(targets) else targets
    return list(targets)


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def named_end(name: str) -> str:
    """Return the end of a module name that is more than a number (`ffn.0` in `h.1.ffn.0`)."""
    parts = name.split(".")
    start = next((index for index in reversed(range(len(parts))) if not parts[index].isdigit()), 0)
    return ".".join(parts[start:])
