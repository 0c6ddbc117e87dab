"""The profile of a machine: measurements of earlier runs for later ones, kept per fingerprint.

Nothing in it decides a number that training computes with. Another driver, card, torch or core count has another
fingerprint, so a profile is never stale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, read_json, write_json
from hivetune.base.typed import from_plain, to_plain


@dataclass(frozen=True)
class Profile:
    """The measurements recorded for one machine: training rates, agreement with transformers, and changes that runs
    needed."""

    fingerprint: str
    # Model and precision -> operations a second of the steps of its last run.
    rates: Mapping[str, float] = field(default_factory=dict)
    # Evidence that the fast path computes right, by its conditions.
    agreements: Mapping[str, Any] = field(default_factory=dict)
    # Model -> rungs that helped a recovery, and when.
    rungs: Mapping[str, Any] = field(default_factory=dict)


def profile_path(fingerprint: str) -> Path:
    return home() / "profiles" / f"{fingerprint}.json"


def read_profile(fingerprint: str) -> Profile:
    """Return the profile of a machine, empty if it is missing or damaged, since it only saves time."""
    try:
        return from_plain(Profile, read_json(profile_path(fingerprint)))
    except (OSError, ValueError):
        return Profile(fingerprint)


def write_profile(profile: Profile) -> None:
    write_json(profile_path(profile.fingerprint), to_plain(profile))
