"""The reader of YAML: limited in bytes and depth, without aliases and repeated keys."""

import re
from pathlib import Path
from typing import Any

import yaml

from hivetune.base.paths import spelled
from hivetune.base.private import read_bounded
from hivetune.errors import UsageError

# A config with all settings has 3 kB, and more with lists of files and system prompts.
MAX_YAML_BYTES, MAX_YAML_DEPTH = 1 << 20, 100
# libyaml's parser where PyYAML was built with it: 1 MiB takes 0.1 s instead of 10 s.
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_LOOKS_LIKE = "settings are lines of text such as `name: value`"
_OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+$|[0-9_]+:)")


def read_yaml(path: Path) -> Any:
    """Return the values of a YAML file within the limits. Raise UsageError, OSError."""
    return parse_yaml(read_bounded(path, MAX_YAML_BYTES), spelled(path))


def parse_yaml(text: bytes | str, where: str) -> Any:
    """Return the values of a YAML text. Raise UsageError that names `where` and the line."""
    try:
        _check_events(text)
        loader = LOADER(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_ambiguous(node, where)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, TypeError) as error:  # ValueError: a date such as 2026-02-30
        raise _not_yaml(text, where, error) from None


def _not_yaml(text: bytes | str, where: str, error: Exception) -> UsageError:
    if isinstance(error, yaml.reader.ReaderError) and not error.reason.endswith("not allowed"):
        return UsageError(f"{where} is not UTF-8 text", hint="save it as UTF-8")
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        reason = error.reason if isinstance(error, yaml.reader.ReaderError) else error
        return UsageError(f"{where} is not YAML: {reason}", hint=_LOOKS_LIKE)
    number = error.problem_mark.line
    lines = (text if isinstance(text, str) else text.decode("utf-8", "replace")).splitlines()
    if number < len(lines) and lines[number].lstrip(" ").startswith("\t"):
        return UsageError(f"{where}:{number + 1}: the line is indented with a tab", hint="indent with spaces")
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    return UsageError(f"{where}:{number + 1} is not YAML: {problem}", hint=_LOOKS_LIKE)


def _check_events(text: bytes | str) -> None:
    """Raise ValueError for deep nesting and for aliases."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        # libyaml's binding is recursive, and deep nesting overruns its stack.
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise ValueError(f"it is nested more than {MAX_YAML_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):  # nine lines of them can stand for 10^9 values
            raise ValueError(f"it has the alias *{event.anchor}: write the value again")


def _refuse_ambiguous(node: yaml.Node, where: str) -> None:
    """Raise UsageError for a repeated key, and for a number that two versions of YAML read in two ways."""
    # YAML 1.1, which PyYAML reads, takes 016 to the base 8 and 1:30 to the base 60.
    if node.tag.endswith((":int", ":float")) and _OTHER_BASE.match(node.value):
        raise UsageError(
            f"{where}:{node.start_mark.line + 1}: {node.value} is another number in YAML 1.1 than in YAML 1.2",
            hint="write a number without a leading 0 and colons, a text in quotes",
        )
    for child in node.value if isinstance(node, yaml.SequenceNode) else ():
        _refuse_ambiguous(child, where)
    lines: dict[str, int] = {}
    for key, child in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if key.value in lines:  # YAML would use the last one in silence
                twice = f"{where}:{line}: {key.value!r} is set twice, first in line {lines[key.value]}"
                raise UsageError(twice, hint="keep one of the two")
            lines[key.value] = line
        _refuse_ambiguous(child, where)
