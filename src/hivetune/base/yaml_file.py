"""The reader of YAML: limited in bytes and depth, without aliases and repeated keys."""

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
            _refuse_repeated(node, where)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise UsageError(f"{where}{line} is not YAML: {problem}", hint=_LOOKS_LIKE) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # a date such as 2026-02-30, bytes that are not UTF-8
        raise UsageError(f"{where} is not YAML: {str(error).splitlines()[0]}", hint=_LOOKS_LIKE) from None


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


def _refuse_repeated(node: yaml.Node, where: str) -> None:
    """Raise UsageError for a repeated key, of which YAML would use the last one in silence."""
    lines: dict[str, int] = {}
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        key, value = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if key.value in lines:
                twice = f"{where}:{line}: {key.value!r} is set twice, first in line {lines[key.value]}"
                raise UsageError(twice, hint="keep one of the two")
            lines[key.value] = line
        _refuse_repeated(value, where)
