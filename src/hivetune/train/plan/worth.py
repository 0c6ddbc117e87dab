"""What more workers are worth, before they are started: whole packs divided among them, against the bytes that travel.

The run's own worker sends 4 bytes a weight of the adapter to each of the others in a step, and gets 8 bytes a weight
back for each pack that they compute.
"""

import math
from dataclasses import dataclass

from hivetune.base.units import step_time

# Between processes of one machine: 35 MB went through a Unix socket in 7 ms (5 GB/s, two busy cores), and each gradient
# is then read and added.
LOCAL_BYTES_PER_S = 2e9
WEIGHT_BYTES = 4
GRADIENT_BYTES = 8
# With less gain than this the other card is better used by another run.
WORTH_STARTING = 1.3


@dataclass(frozen=True)
class Worth:
    """`alone_s`, `together_s`: a step by one worker and by all; `exchange_s`: the part of the latter that is bytes.
    `link`: what carries them, in words; "" inside one machine."""

    workers: int
    packs: int
    alone_s: float
    together_s: float
    exchange_s: float
    link: str = ""

    @property
    def gain(self) -> float:
        return self.alone_s / self.together_s

    @property
    def words(self) -> str:
        packs = "1 pack" if self.packs == 1 else f"{self.packs} packs"
        told = (
            f"{self.workers} workers: a step of {packs} takes {step_time(self.together_s)} instead of "
            f"{step_time(self.alone_s)}, {step_time(self.exchange_s)} of it for gradients and "
            f"weights{self.link and f' over {self.link}'}"
        )
        if self.gain >= WORTH_STARTING:
            return told
        return f"{told}: not worth it, use the other devices for other runs (hivetune sweep, hivetune experts)"


def worth_of(
    workers: int,
    packs: int,
    step_s: float,
    adapter_weights: int,
    *,
    bytes_per_s: float = LOCAL_BYTES_PER_S,
    link: str = "",
) -> Worth:
    """`packs` of equal size in a step that takes one worker `step_s`; `bytes_per_s`: of the `link` of the run's own
    worker to the others."""
    packs = max(1, packs)
    longest = math.ceil(packs / workers)
    sent = WEIGHT_BYTES * adapter_weights * min(workers - 1, packs - longest)
    received = GRADIENT_BYTES * adapter_weights * (packs - longest)
    exchange_s = (sent + received) / bytes_per_s
    return Worth(workers, packs, step_s, step_s * longest / packs + exchange_s, exchange_s, link)
