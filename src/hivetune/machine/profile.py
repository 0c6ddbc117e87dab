"""What was measured on a machine, kept per fingerprint: rates, points of a probe, choices that worked.

One file a machine, `home()/profiles/FINGERPRINT.json`. The engine writes it (probe, doctor, recovery); everything else
reads it. A changed driver, card, torch or core count is another fingerprint, so nothing here is ever stale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, read_json, write_json
from hivetune.base.typed import from_plain, to_plain

_SCHEMA = 1
_DTYPES, _PRODUCTS = "dtypes", "products"
# Half precision has to be worth its rounding, and another set of backends the change: on CPUs with native bf16 it is
# 1.7 to 2.3 times faster, without it 40 to 500 times slower (pytorch/pytorch#146508).
WORTH_IT = 1.25


@dataclass(frozen=True)
class ProvenSet:
    """The backends that computed right and fastest in one precision: `choices` over the defaults, `environment` of the
    process, and the seconds of a step's parts at the size of the proof."""

    step_s: float
    choices: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Proof:
    """What a device was proven to compute right. `best`: by dtype, the fastest right set; a dtype that is not in it has
    none. `dtype`: the fastest of all that is worth its rounding. `rejected`: name of a set -> why."""

    time: float
    job: str
    dtype: str | None
    best: Mapping[str, ProvenSet] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """`rates`: device ("cpu", "cuda:0") -> dtype -> FLOP/s of a canary GEMM. `probes`: model and setting -> points.
    `choices`: what a run should start with here: `rungs` that helped a recovery, `dtypes`, what `dtype: auto` was, and
    `products`, what multiplies matrices of a dtype.
    `other_rates`: device -> bandwidth, launch_s, to_device, from_device (measure/rates.py), and under "disk" the
    bytes a second that it takes. `proofs`: device -> Proof, as plain values.
    """

    fingerprint: str
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)
    other_rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    proofs: Mapping[str, Any] = field(default_factory=dict)

    def with_rates(self, device: str, rates: Mapping[str, float]) -> "Profile":
        """The best seen of each: a busy minute says nothing about what the machine can do."""
        known = self.rates.get(device, {})
        best = {dtype: max(rate, known.get(dtype, 0.0)) for dtype, rate in rates.items()}
        return replace(self, rates={**self.rates, device: best})

    def decided_dtype(self, device: str) -> str | None:
        """What `dtype: auto` was decided to be on this device; None: never yet."""
        return self._decided(_DTYPES, device)

    def with_dtype(self, device: str, dtype: str) -> "Profile":
        return self._with_decided(_DTYPES, device, dtype)

    def decided_products(self, device: str, dtype: str) -> str | None:
        """What multiplies matrices of this dtype on this device; None: never decided yet."""
        return self._decided(_PRODUCTS, f"{device} {dtype}")

    def with_products(self, device: str, dtype: str, products: str) -> "Profile":
        return self._with_decided(_PRODUCTS, f"{device} {dtype}", products)

    def _decided(self, what: str, device: str) -> str | None:
        decided = self.choices.get(what)
        return decided.get(device) if isinstance(decided, dict) else None

    def _with_decided(self, what: str, device: str, value: str) -> "Profile":
        return replace(self, choices={**self.choices, what: {**self.choices.get(what, {}), device: value}})

    def proof(self, device: str) -> Proof | None:
        """None: never proven here, or by another version."""
        try:
            return from_plain(Proof, self.proofs[device]) if device in self.proofs else None
        except ValueError:
            return None

    def with_proof(self, device: str, proof: Proof) -> "Profile":
        proven = replace(self, proofs={**self.proofs, device: to_plain(proof)})
        return proven if proof.dtype is None else proven.with_dtype(device, proof.dtype)

    def right_rates(self, device: str) -> Mapping[str, float] | None:
        """`rates` of the device, without the precisions in which no backend computed right; None: never measured."""
        rates, proof = self.rates.get(device), self.proof(device)
        if rates is None or proof is None or not proof.best:
            return rates
        return {dtype: rate for dtype, rate in rates.items() if dtype in proof.best}

    def with_probe(self, key: str, probe: Mapping[str, Any]) -> "Profile":
        return replace(self, probes={**self.probes, key: dict(probe)})


_PARTS = [part.name for part in fields(Profile) if part.name != "fingerprint"]


def profile_path(fingerprint: str) -> Path:
    return home() / "profiles" / f"{fingerprint}.json"


def read_profile(fingerprint: str) -> Profile:
    """What is known of the machine; empty when nothing is, or when the file is damaged: it only saves time."""
    try:
        content = read_json(profile_path(fingerprint))
    except (OSError, ValueError):
        return Profile(fingerprint)
    if content.get("schema") != _SCHEMA:
        return Profile(fingerprint)
    parts = {name: content[name] for name in _PARTS if name in content}
    return Profile(fingerprint, **{name: part for name, part in parts.items() if isinstance(part, dict)})


def proven_before(fingerprint: str) -> bool:
    """Whether a proof was made in this home, but none under this fingerprint: driver, torch or card changed since."""
    others = [path.stem for path in (home() / "profiles").glob("*.json") if path.stem != fingerprint]
    return not read_profile(fingerprint).proofs and any(read_profile(other).proofs for other in others)


def write_profile(profile: Profile) -> Path:
    path = profile_path(profile.fingerprint)
    content = {key: value for key, value in vars(profile).items() if key != "fingerprint"}
    write_json(path, {"schema": _SCHEMA, "fingerprint": profile.fingerprint, **content})
    return path
