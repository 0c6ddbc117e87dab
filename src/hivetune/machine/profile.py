"""The profile of a machine: measured rates, probes and remembered choices, kept per fingerprint.

The probe and recovery write `home()/profiles/FINGERPRINT.json`; everything else reads it. Another driver,
card, torch or core count has another fingerprint, so a profile is never stale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import home, read_json, write_json

_SCHEMA = 1
# What `dtype: auto` is on a device, and what multiplies matrices on "DEVICE DTYPE".
Decision = Literal["dtypes", "products"]
# The speed-up that makes half precision worth its rounding, or another backend worth the change. On CPUs with native
# bf16 it is 1.7 to 2.3 times faster, without it 40 to 500 times slower (pytorch/pytorch#146508).
WORTH_IT = 1.25


@dataclass(frozen=True)
class Profile:
    """The measurements of one machine.

    `rates`: device ("cpu", "cuda:0") -> dtype -> FLOP/s of a canary GEMM. `probes`: model and setting -> points.
    `choices`: `rungs` that helped a recovery, `dtypes` that `dtype: auto` became, `products` that multiply matrices.
    `other_rates`: device -> bandwidth, launch_s, to_device, from_device (measure/rates.py).
    """

    fingerprint: str
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)
    other_rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def with_rates(self, device: str, rates: Mapping[str, float]) -> "Profile":
        """Return the profile with the best rates seen, since a busy minute does not show what the machine can do."""
        best_before = self.rates.get(device, {})
        best = {dtype: max(rate, best_before.get(dtype, 0.0)) for dtype, rate in rates.items()}
        return replace(self, rates={**self.rates, device: best})

    def decided(self, topic: Decision, device: str) -> str | None:
        """Return what was decided for this device, None if it never was."""
        decided = self.choices.get(topic)
        return decided.get(device) if isinstance(decided, dict) else None

    def with_decided(self, topic: Decision, device: str, value: str) -> "Profile":
        return replace(self, choices={**self.choices, topic: {**self.choices.get(topic, {}), device: value}})

    def with_probe(self, key: str, probe: Mapping[str, Any]) -> "Profile":
        return replace(self, probes={**self.probes, key: dict(probe)})


_PARTS = [part.name for part in fields(Profile) if part.name != "fingerprint"]


def profile_path(fingerprint: str) -> Path:
    return home() / "profiles" / f"{fingerprint}.json"


def read_profile(fingerprint: str) -> Profile:
    """Return the profile of a machine, empty if it is missing or damaged, since it only saves time."""
    try:
        content = read_json(profile_path(fingerprint))
    except (OSError, ValueError):
        return Profile(fingerprint)
    if content.get("schema") != _SCHEMA:
        return Profile(fingerprint)
    parts = {name: content[name] for name in _PARTS if name in content}
    return Profile(fingerprint, **{name: part for name, part in parts.items() if isinstance(part, dict)})


def write_profile(profile: Profile) -> Path:
    path = profile_path(profile.fingerprint)
    content = {key: value for key, value in vars(profile).items() if key != "fingerprint"}
    write_json(path, {"schema": _SCHEMA, "fingerprint": profile.fingerprint, **content})
    return path
