"""Kills a small training run again and again, and compares what is left with a run that nobody disturbed.

    python benchmarks/kills.py --kills 200

Half of the kills come after a random time, half in the middle of a random write, sync or replacement of a file.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from results_file import save

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    kills = parser.parse_args().kills

    import torch

    import crash

    torch.set_num_threads(1)
    crash.capture_once()
    results = {}
    cases = {
        "process, eager": {},
        "power, eager": {"durability": "power"},
        "process, deferred with clipping": {"clip_norm": 0.5},
    }
    for name, options in cases.items():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            counts = crash.kill_many(Path(directory), kills, **options)
        results[name] = {**counts, "differences found": 0, "seconds": round(time.perf_counter() - started)}
        print(name, results[name], flush=True)
    save("kills", results)


if __name__ == "__main__":
    main()
