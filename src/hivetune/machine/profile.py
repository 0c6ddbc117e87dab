"""What was measured on a machine, kept per fingerprint: rates, points of a probe, choices that worked.

One file a machine, `home()/profiles/FINGERPRINT.json`. The engine writes it (probe, doctor, recovery); everything else
reads it. A changed driver, card, torch or core count is another fingerprint, so nothing here is ever stale.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, read_json, write_json

_SCHEMA = 1
_DTYPES = "dtypes"


@dataclass(frozen=True)
class Profile:
    """`rates`: device ("cpu", "cuda:0") -> dtype -> FLOP/s of a canary GEMM. `probes`: model and setting -> points.
    `choices`: what a run should start with here: `rungs` that helped a recovery, and `dtypes`, what `dtype: auto` was.
    """

    fingerprint: str
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)

    def with_rates(self, device: str, rates: Mapping[str, float]) -> "Profile":
        """The best seen of each: a busy minute says nothing about what the machine can do."""
        known = self.rates.get(device, {})
        best = {dtype: max(rate, known.get(dtype, 0.0)) for dtype, rate in rates.items()}
        return replace(self, rates={**self.rates, device: best})

    def decided_dtype(self, device: str) -> str | None:
        """What `dtype: auto` was decided to be on this device; None: never yet."""
        decided = self.choices.get(_DTYPES)
        return decided.get(device) if isinstance(decided, dict) else None

    def with_dtype(self, device: str, dtype: str) -> "Profile":
        return replace(self, choices={**self.choices, _DTYPES: {**self.choices.get(_DTYPES, {}), device: dtype}})

    def with_probe(self, key: str, probe: Mapping[str, Any]) -> "Profile":
        return replace(self, probes={**self.probes, key: dict(probe)})


def profile_path(fingerprint: str) -> Path:
    return home() / "profiles" / f"{fingerprint}.json"


def read_profile(fingerprint: str) -> Profile:
    """What is known of the machine; empty when nothing is, or when the file is damaged: it only saves time."""
    try:
        content = read_json(profile_path(fingerprint))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return Profile(fingerprint)
    if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
        return Profile(fingerprint)
    parts = {name: content[name] for name in ("rates", "choices", "probes") if name in content}
    return Profile(fingerprint, **{name: part for name, part in parts.items() if isinstance(part, dict)})


def write_profile(profile: Profile) -> Path:
    path = profile_path(profile.fingerprint)
    content = {key: value for key, value in vars(profile).items() if key != "fingerprint"}
    write_json(path, {"schema": _SCHEMA, "fingerprint": profile.fingerprint, **content})
    return path
