"""A simulation of one step on 1 to 64 workers: which number is worth it on which link. Nothing is measured here.

Packs go to whoever is free; each takes the seconds that were measured for it. Weights and one sum a worker share the
link of the run's own worker, one after the other. The workers are equally fast.

    python bench/cluster.py                                          the table of docs/cluster.md
    python bench/cluster.py --pack-s 1.3 --weights 80.7 --packs 16   a case of your own
"""

import argparse
import heapq
from dataclasses import dataclass

from hivetune.machine.inventory import TCP_SHARE
from hivetune.train.plan.speed import GRADIENT_BYTES, LOCAL_BYTES_PER_S, WEIGHT_BYTES

WORKERS = (1, 2, 4, 8, 16, 32, 64)
# One machine, then networks by their names.
LINKS = {"one machine": LOCAL_BYTES_PER_S} | {
    f"{gigabit:g} Gbit/s": gigabit * 1e9 / 8 * TCP_SHARE for gigabit in (1, 2.5, 10, 25)
}
OWN = 0


@dataclass(frozen=True)
class Case:
    """`pack_s`: measured seconds of one pack; `weights`: of the adapter; `packs`: of a step."""

    title: str
    pack_s: float
    weights: float
    packs: int


CASES = (
    Case("4.9 million weights, packs of 1 s", 1.0, 4.9e6, 64),
    Case("4.9 million weights, packs of 1 s, few of them", 1.0, 4.9e6, 8),
    Case("80.7 million weights, packs of 20 s", 20.0, 80.7e6, 32),
)


def step_s(case: Case, workers: int, bytes_per_s: float) -> float:
    """Return the seconds of a step. Weights leave one after the other, and so do the sums that come back."""
    weights_s, sum_s = WEIGHT_BYTES * case.weights / bytes_per_s, GRADIENT_BYTES * case.weights / bytes_per_s
    starts_s = [0.0] + [rank * weights_s for rank in range(1, workers)]
    free_s = [(start, worker) for worker, start in enumerate(starts_s)]
    computed = [0] * workers
    for _ in range(case.packs):  # to whoever is free first
        at, worker = heapq.heappop(free_s)
        computed[worker] += 1
        heapq.heappush(free_s, (at + case.pack_s, worker))
    link_free_s = 0.0
    for at, worker in sorted(free_s):
        if worker != OWN and computed[worker]:
            link_free_s = max(at, link_free_s) + sum_s
    return max(link_free_s, next(at for at, worker in free_s if worker == OWN))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pack-s", type=float, help="measured seconds of a pack")
    arguments.add_argument("--weights", type=float, help="millions of weights of the adapter")
    arguments.add_argument("--packs", type=int, help="packs of a step")
    given = arguments.parse_args()
    cases = CASES
    if given.pack_s and given.weights and given.packs:
        cases = (Case("as given", given.pack_s, given.weights * 1e6, given.packs),)
    print("Simulated: how many times as fast as one worker.")
    for case in cases:
        print(f"\n{case.title}, {case.packs} packs a step\n")
        print("| link | " + " | ".join(f"{count}" for count in WORKERS[1:]) + " |")
        print("| --- |" + " --- |" * (len(WORKERS) - 1))
        alone_s = step_s(case, 1, LOCAL_BYTES_PER_S)
        for name, bytes_per_s in LINKS.items():
            gains = (alone_s / step_s(case, count, bytes_per_s) for count in WORKERS[1:])
            print(f"| {name} | " + " | ".join(f"{gain:.1f}" for gain in gains) + " |")


if __name__ == "__main__":
    main()
