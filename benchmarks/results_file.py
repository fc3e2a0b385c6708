"""Result files: every claim with its command, commit, machine, date and numbers."""

import json
import os
import platform
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict[str, Any]:
    """The numbers of `results/NAME.json`, if there are any."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())["numbers"]) if path.exists() else {}


def save(name: str, numbers: Any) -> Path:
    """Writes `results/NAME.json`."""
    root = Path(__file__).parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=root
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "src"], capture_output=True, text=True, cwd=root
    ).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    record = {
        "command": re.sub(r"(?<=--directory )\S+", "DIR", " ".join(["python", *sys.argv])),
        "commit": commit + ("+changes" if dirty else ""),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, {memory:.0f} GiB, no accelerator",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "numbers": numbers,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
