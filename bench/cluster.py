"""A simulation of one step on 1 to 64 workers: which number is worth it on which link. Nothing is measured here.

Packs are handed out by the code that hands them out in a run; each takes the seconds that were measured for it, and
weights and gradients share the link of the run's own worker, one after the other. The workers are equally fast.

    python bench/cluster.py                                          the table of docs/cluster.md
    python bench/cluster.py --pack-s 1.3 --weights 80.7 --packs 16   a case of your own
"""

import argparse
import heapq
from dataclasses import dataclass

from hivetune.machine.network import TCP_SHARE
from hivetune.train.plan.speed import GRADIENT_BYTES, LOCAL_BYTES_PER_S, WEIGHT_BYTES
from hivetune.train.worker.exchange.handout import Handout, Paces

WORKERS = (1, 2, 4, 8, 16, 32, 64)
# One machine, then networks by their names.
LINKS = {"one machine": LOCAL_BYTES_PER_S} | {
    f"{gigabit:g} Gbit/s": gigabit * 1e9 / 8 * TCP_SHARE for gigabit in (1, 2.5, 10, 25)
}
STEPS = 2  # the first teaches the workers' paces
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
    """Seconds of a step, the last of a few."""
    paces, taken_s = Paces(), 0.0
    for _ in range(STEPS):
        taken_s = _round_s(case, workers, bytes_per_s, paces)
    return taken_s


def _round_s(case: Case, workers: int, bytes_per_s: float, paces: Paces) -> float:
    handout, alive = Handout([1] * case.packs, (), paces), range(workers)
    weights_s, gradient_s = WEIGHT_BYTES * case.weights / bytes_per_s, GRADIENT_BYTES * case.weights / bytes_per_s
    link_free_s, now_s = 0.0, 0.0
    has_weights, idle = {OWN}, set(alive)
    ends: list[tuple[float, int, int, bool]] = []  # when, who, which pack, whether it was computed or has arrived
    while not handout.done(alive, now_s):
        for worker in sorted(idle):
            pack = handout.take(worker, alive, now_s)
            if pack is None:
                continue
            idle.discard(worker)
            start_s = now_s
            if worker not in has_weights:
                has_weights.add(worker)
                start_s = link_free_s = max(now_s, link_free_s) + weights_s
            heapq.heappush(ends, (start_s + case.pack_s, worker, pack, worker == OWN))
        if not ends:
            now_s += 0.05
            continue
        now_s, worker, pack, arrived = heapq.heappop(ends)
        if arrived:
            handout.give(worker, pack, "", now_s)
            idle.add(worker)
        else:
            link_free_s = max(now_s, link_free_s) + gradient_s
            heapq.heappush(ends, (link_free_s, worker, pack, True))
    return now_s


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
