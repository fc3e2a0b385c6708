"""Memory that importing and exporting a model of 2 GB takes.

    python benchmarks/checkpoint.py

Each direction runs in a process of its own; what counts is its peak resident memory above what it had before.
"""

import multiprocessing
import resource
import tempfile
from pathlib import Path
from typing import Any

from results_file import save


def make_trainer(store: Path, weights: Path | None) -> Any:
    import torch

    import packhorse as ph
    from packhorse.models import GPT, GPTConfig
    from packhorse.models.zoo import predict_tokens

    with torch.device("meta"):
        model = GPT(GPTConfig(13, 25, 1600, 64, 50257))
    tokens = torch.randint(50257, (1, 65))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ph.Trainer(model, optimizer, batch, loss=predict_tokens, strategy="relay", store=store, weights=weights)


def measure(what: str, directory: Path, pipe: Any) -> None:
    import packhorse.archive
    import packhorse.models
    from packhorse.memory import resident_bytes

    if what == "save":
        trainer = make_trainer(directory / "imported again", directory / "made")
    before = resident_bytes()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts from here
    if what == "make":
        make_trainer(directory / "first", None).save(directory / "made")
    elif what == "import":
        make_trainer(directory / "imported", directory / "made").close()
    elif what == "save":
        trainer.save(directory / "saved")
    else:
        packhorse.archive.export_store(directory / "imported", directory / "exported")
    pipe.send((before, peak_bytes()))


def peak_bytes() -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    context = multiprocessing.get_context("spawn")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for what in ("make", "import", "save", "export"):
            ours, theirs = context.Pipe()
            child = context.Process(target=measure, args=(what, directory, theirs))
            child.start()
            before, peak = ours.recv()
            child.join()
            results[what] = {"before_mb": round(before / 1e6), "added_mb": round((peak - before) / 1e6)}
            print(what, results[what], flush=True)
        files = {place: sorted((directory / place).glob("*.safetensors")) for place in ("made", "saved", "exported")}
        results["bytes"] = sum(file.stat().st_size for file in files["made"])
        results["all the same"] = all(
            a.read_bytes() == b.read_bytes() == c.read_bytes() for a, b, c in zip(*files.values(), strict=True)
        )
    save("checkpoint", results)


if __name__ == "__main__":
    main()
