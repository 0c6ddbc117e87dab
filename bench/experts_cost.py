"""What `hivetune experts` costs beside a plain training: processor seconds of the commands with all their children.

    python bench/experts_cost.py --work FOLDER --out docs/proof/bench_experts_cost.json     two minutes on two cores

Planted domains on the tiny model of the tests (tests/specialists/planted.py), in a new home: a plain training, which
also measures the machine; the same training again, which finds the machine's profile; then `experts --propose` and
`experts --train` on the same rows. Processor seconds do not depend on what else runs, unlike the time of day.

`--rows` of each domain and `--shuffled` (agents that say nothing, so that nothing is trained) choose the planted set.
The decisions and the hashes of all adapters are printed with the seconds: what makes it cheaper must not change them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from serve.hive import make_home  # noqa: E402
from specialists.planted import SHARED, domain, settings_of, shuffled_agents  # noqa: E402

from hivetune.base.database import open_database  # noqa: E402
from hivetune.base.disk import home as user_home  # noqa: E402
from hivetune.machine.inventory import describe_machine, read_machine  # noqa: E402
from hivetune.release.registry import desired, find  # noqa: E402
from hivetune.routing.steps import newest_steps  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.work.mkdir(parents=True)
    os.environ.setdefault("HIVETUNE_CONVERTERS", str(user_home() / "converter"))  # llama.cpp's, which was fetched
    os.environ["HIVETUNE_HOME"] = str(asked.work.resolve() / "home")
    make_home()
    config = write_config(asked.work.resolve(), planted(asked.rows, shuffled=asked.shuffled))
    spent = {"training in a new home": cost("train", config, f"output={asked.work}/first")}
    spent["training"] = cost("train", config, f"output={asked.work}/shared")
    hivetune("register", f"{asked.work}/shared", "--as", SHARED)
    hivetune("promote", f"{SHARED}@1", "--force", "--reason", "what experts are held against")
    spent["propose"] = cost("experts", config, propose=True)
    if not asked.shuffled:
        spent["train"] = cost("experts", config, train=True)
    both = spent["propose"] + spent.get("train", 0.0)
    found = {
        "schema": 1,
        "machine": describe_machine(read_machine()),
        "date": time.strftime("%Y-%m-%d"),
        "rows": 2 * asked.rows + 30,
        "processor_s": spent,
        "experts_by_training": round(both / spent["training"], 2),
        "experts_by_training_in_a_new_home": round(both / spent["training in a new home"], 2),
        "decisions": decisions(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")


def planted(count: int, *, shuffled: bool) -> list[Any]:
    """Two domains of `count` rows that answer differently, and one that is too small."""
    rows = [*domain("coder", "brief", count, cue="code"), *domain("tester", "formal", count, cue="test")]
    rows = shuffled_agents(rows, 1) if shuffled else rows
    return [*rows, *domain("novice", "list", 30, cue="odd")]


def write_config(folder: Path, rows: Sequence[Any]) -> Path:
    # Other programs on the machine decide nothing.
    settings = {**settings_of(folder, rows), "gate": {"latency": {"ratio": 100}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder / "config.yaml"


def cost(command: str, config: Path, *settings: str, **options: bool) -> float:
    """Run a command, and return the processor seconds of its process and of every child that was waited for."""
    words = [word for setting in settings for word in ("--set", setting)]
    return hivetune(command, str(config), *words, *(f"--{name}" for name, chosen in options.items() if chosen))


def hivetune(*words: str) -> float:
    process = subprocess.Popen([sys.executable, "-m", "hivetune", *words, "--json"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"hivetune {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    return round(usage.ru_utime + usage.ru_stime, 1)


def decisions() -> dict[str, Any]:
    """Return each domain's step with its reason, and the adapters that serve."""
    with closing(open_database()) as database:
        steps = newest_steps(database, SHARED)
        serving = {
            name: find(database, f"{name}@{version}").adapter_sha256 for name, version in desired(database).items()
        }
    return {
        "domains": {step.domain.label: [step.step, step.reason] for step in steps.values()},
        "adapters": serving,
    }


if __name__ == "__main__":
    main()
