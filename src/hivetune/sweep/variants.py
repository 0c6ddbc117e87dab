"""What a sweep tries: every combination of the values that `--over` gives, each as a config of its own. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hivetune.config import RunConfig, override_config
from hivetune.errors import UsageError

MOST_VARIANTS = 64


@dataclass(frozen=True)
class Variant:
    """One combination. `settings`: `a.b=c` each, in the order of `--over`; `label` joins them."""

    settings: tuple[str, ...]
    config: RunConfig

    @property
    def label(self) -> str:
        return " ".join(self.settings)


def make_variants(config: RunConfig, over: Sequence[str]) -> list[Variant]:
    """`over`: `a.b=c,d`, the values divided by commas that stand in no bracket or quotes. Raises UsageError."""
    axes = [_axis(text) for text in over]
    if not axes:
        raise UsageError("a sweep needs settings to try", hint="for example --over learning_rate=1e-4,2e-4 lora.r=8,16")
    keys = [values[0].partition("=")[0] for values in axes]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise UsageError(f"--over {twice} is given twice", hint=f"name all its values at once: {twice}=A,B")
    refused = next((key for key in keys if key == "output" or key.startswith(("supervise.", "cycle."))), None)
    if refused is not None:
        raise UsageError(f"--over {refused} changes nothing that is learnt", hint="try settings of the training")
    combinations = list(itertools.product(*axes))
    if len(combinations) > MOST_VARIANTS:
        raise UsageError(f"{len(combinations)} combinations, at most {MOST_VARIANTS}", hint="name fewer values")
    return [Variant(settings, override_config(config, settings, "--over")) for settings in combinations]


def _axis(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    parts = _parts(values)
    if not equals or not key or not all(parts):
        raise UsageError(f"--over {text}: not of the form a.b=c,d", hint="for example --over learning_rate=1e-4,2e-4")
    if len(set(parts)) < len(parts):
        raise UsageError(f"--over {text}: a value is listed twice")
    return [f"{key}={value}" for value in parts]


def _parts(values: str) -> list[str]:
    """Divided by the commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
            if letter == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]
