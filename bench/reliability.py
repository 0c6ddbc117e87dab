"""How many runs end by themselves, with real processes and by the ladder alone, and how much of the time is useful.

    python bench/reliability.py completion --out docs/measured/completion.json     about 5 minutes
    python bench/reliability.py ladder                                          about 20 seconds, in memory
    python bench/reliability.py useful --out docs/measured/useful_time.json        about 4 minutes, on a quiet machine

completion: runs of the scripted worker (tests/train/supervise), each with one to three random faults of the kinds that
a run can survive, at random steps and rows. ladder: the same runs played in memory (supervise/worlds.py). useful: the
real worker on SmolLM2-135M, killed again and again; what one kill costs (noticing, loading, steps made twice) gives
the share at one fault per ten minutes.
"""

import argparse
import collections
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/train/supervise"))

from scripted import CARD, make_run, supervise  # noqa: E402
from worlds import World, draw, play  # noqa: E402

from hivetune.base.disk import write_json  # noqa: E402
from hivetune.base.journal import read_journal  # noqa: E402
from hivetune.config import parse_config  # noqa: E402
from hivetune.errors import HivetuneError  # noqa: E402
from hivetune.machine.inventory import describe_machine, read_machine  # noqa: E402
from hivetune.synth.demo import write_demo_data  # noqa: E402
from hivetune.train.start import open_run, train_run  # noqa: E402
from hivetune.train.supervise.attempt import Terms  # noqa: E402
from hivetune.train.supervise.ladder import Bounds  # noqa: E402

KILLS, BETWEEN_S = 4, 25.0
TEN_MINUTES_S = 600.0


def completion(runs: int = 200, seed: int = 1000) -> dict[str, Any]:
    """Every run is started once; whoever needs a person has failed."""
    ended, needed_person = 0, []
    restarts: dict[int, list[int]] = collections.defaultdict(list)
    met: collections.Counter[str] = collections.Counter()
    for number in range(seed, seed + runs):
        chosen, faults = draw(number)
        met.update(chosen)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HIVETUNE_HOME"] = f"{folder}/home"
            config = make_run(Path(folder), faults, device="cuda")
            outcome = supervise(Path(folder), config, CARD)
        restarts[len(chosen)].append(outcome.restarts)
        ended += outcome.status == "done"
        if outcome.status != "done":
            needed_person.append({"seed": number, "faults": chosen, "diagnoses": list(outcome.faults)})
    return {
        "schema": 1,
        "claim": "runs with one to three random survivable faults that ended by themselves",
        "runs": runs,
        "first_seed": seed,
        "ended": ended,
        "completion_rate": ended / runs,
        "restarts": {
            f"{number} fault{'s' * (number > 1)}": {
                "runs": len(counts),
                "median": statistics.median(counts),
                "most": max(counts),
                "more than 6": sum(count > 6 for count in counts),
            }
            for number, counts in sorted(restarts.items())
        },
        "faults_met": dict(sorted(met.items())),
        "needed_a_person": needed_person,
    }


def useful() -> dict[str, Any]:
    """The real worker, killed KILLS times; what each kill cost beyond the steps that count."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_demo_data(Path(folder) / "rows.jsonl", 1200)
        config = parse_config(
            {
                "model": "smollm2-135m",
                "data": {"path": str(data)},
                "epochs": 20,
                "batch_size": 8,
                "max_length": 512,
                "validate_every": 100_000,
                "output": f"{folder}/run",
            }
        )
        run = open_run(config, "reliability")
        lost, stopped = [], False
        last_kill = time.monotonic()

        def on_step(done: int) -> None:
            nonlocal last_kill, stopped
            if time.monotonic() - last_kill < BETWEEN_S or stopped:
                return
            if len(lost) == KILLS:
                stopped = True
                os.kill(os.getpid(), signal.SIGTERM)
                return
            pid = [e["pid"] for e in read_journal(run.folder / "events.jsonl") if e["event"] == "attempt"][-1]
            lost.append({"killed_at": time.time(), "step": done})
            last_kill = time.monotonic()
            os.kill(pid, signal.SIGKILL)

        started = time.time()
        try:
            train_run(run, Terms(on_step))
        except HivetuneError as error:
            print(error, file=sys.stderr)
        return _report(run.folder, started, lost)


def _report(run: Path, started: float, lost: list[dict[str, Any]]) -> dict[str, Any]:
    """From the run's own journals: when it was back at the step it was killed in."""
    steps = {e["step"]: e for e in read_journal(run / "metrics.jsonl") if e["event"] == "step"}
    saves = [e for e in read_journal(run / "metrics.jsonl") if e["event"] == "saved"]
    events = list(read_journal(run / "events.jsonl"))
    ends = [e for e in events if e["event"] == "failure"]
    for kill, end in zip(lost, ends, strict=True):
        kill["noticed_s"] = round(end["time"] - kill["killed_at"], 3)
        kill["steps_made_twice"] = end["step"] - end["durable"]
        kill["cost_s"] = round(
            steps[end["step"] + 1]["time"] - steps[end["step"] + 1]["seconds"] - kill["killed_at"], 3
        )
    step_s = statistics.median(e["seconds"] for e in steps.values())
    wall_s = max(e["time"] for e in steps.values()) - started
    cost_s = statistics.mean(kill["cost_s"] for kill in lost)
    blocking = sum(e["blocking_s"] for e in saves) / wall_s
    return {
        "schema": 1,
        "claim": "share of the wall time in steps that count, SmolLM2-135M, real SIGKILLs of the worker",
        "machine": describe_machine(read_machine()),
        "step_s": round(step_s, 3),
        "kills": [{name: value for name, value in kill.items() if name != "killed_at"} for kill in lost],
        "cost_of_a_kill_s": round(cost_s, 3),
        "blocking_of_saves": round(blocking, 5),
        "useful_share_measured": round(sum(e["seconds"] for e in steps.values()) / wall_s, 4),
        "one_fault_every_s_measured": round(wall_s / len(lost), 1),
        "useful_share_at_one_fault_per_ten_minutes": round((1 - blocking) * (1 - cost_s / TEN_MINUTES_S), 4),
    }


def ladder(runs: int = 20_000, seed: int = 0) -> dict[str, Any]:
    """The rules of the supervisor against the same random faults, without a process: thousands in a second."""
    needed_person = []
    for number in range(seed, seed + runs):
        chosen, faults = draw(number)
        status, history = play(World(faults, Bounds(on_device=True), random.Random(number)))
        if status != "done":
            diagnoses = [f"{failure.fault} in step {failure.step}" for failure in history]
            needed_person.append({"seed": number, "faults": chosen, "diagnoses": diagnoses})
            print(needed_person[-1], file=sys.stderr)
    ended = runs - len(needed_person)
    return {"schema": 1, "runs": runs, "first_seed": seed, "ended": ended, "needed_a_person": needed_person}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("completion", "ladder", "useful"))
    parser.add_argument("--runs", type=int, help="default: 200 with processes, 20,000 in memory")
    parser.add_argument("--seed", type=int, help="of the first run; default: 1000 with processes, 0 in memory")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    given = {name: value for name in ("runs", "seed") if (value := vars(arguments)[name]) is not None}
    result = {"completion": completion, "ladder": ladder, "useful": useful}[arguments.what](**given)
    if arguments.out:
        write_json(arguments.out, result)
    print({name: value for name, value in result.items() if not isinstance(value, (dict, list))})


if __name__ == "__main__":
    main()
