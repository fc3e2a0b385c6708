"""Kills a small training run again and again, and compares what is left with a run that nobody disturbed.

    python benchmarks/kills.py --kills 200
    python benchmarks/kills.py --kills 200 --versions 1   # one version and a spare: interrupted steps are finished

Half of the kills come after a random time, half in the middle of a random write, sync or replacement of a file.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results_file import save

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--versions", type=int, choices=(1, 2), default=2)
    arguments = parser.parse_args()
    kills = arguments.kills

    import torch

    import crash

    torch.set_num_threads(1)
    crash.capture_once()
    results = {}
    cases: dict[str, dict[str, Any]] = {
        "process, eager": {},
        "power, eager": {"durability": "power"},
        "process, deferred with clipping": {"clip_norm": 0.5},
    }
    if arguments.versions == 1:
        cases["process, eager, SGD with momentum, skips and ties"] = {"model_kind": "knot", "momentum": 0.9}
        cases["power, deferred, skips and ties"] = {"model_kind": "knot", "durability": "power", "clip_norm": 0.5}
        cases = {name: {**options, "versions": 1} for name, options in cases.items()}
    for name, options in cases.items():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            counts = crash.kill_many(Path(directory), kills, **options)
        results[name] = {**counts, "differences found": 0, "seconds": round(time.perf_counter() - started)}
        print(name, results[name], flush=True)
    save("kills" if arguments.versions == 2 else "kills_one_version", results)


if __name__ == "__main__":
    main()
