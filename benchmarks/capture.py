"""How long capture and partition take, what they leave in the caller's memory, how well the cuts balance.

Each model in a process of its own: python benchmarks/capture.py
"""

import json
import subprocess
import sys
import time

CASES = [
    ("mlp", 3),
    ("alexnet", 3),
    ("vgg16", 4),
    ("resnet50", 4),
    ("unet", 4),
    ("bert-large", 6),
    ("gpt2", 6),
    ("gpt2-xl", 6),
    ("gpt-384-layers", 6),
    ("transformers-gpt2-384-layers", 6),
]


def build(name: str):
    import torch

    from packhorse.models import GPT, GPTConfig, load_task
    from packhorse.models.zoo import predict_tokens

    tokens = torch.zeros(1, 1024, dtype=torch.long)
    if name == "gpt-384-layers":
        with torch.device("meta"):
            return (
                GPT(GPTConfig(layers=384, heads=16, width=1024)),
                {"tokens": tokens, "targets": tokens},
                predict_tokens,
            )
    if name == "transformers-gpt2-384-layers":
        from transformers import GPT2Config, GPT2LMHeadModel

        with torch.device("meta"):
            model = GPT2LMHeadModel(GPT2Config(n_layer=384, n_embd=1024, n_head=16))
        return model, {"input_ids": tokens, "labels": tokens}, None
    task = load_task(name)
    return task.model, task.example, task.loss


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def measure(name: str, count: int) -> dict:
    import packhorse as ph

    model, example, loss = build(name)
    before, start = resident_mb(), time.monotonic()
    graph = ph.capture(model, example, loss)
    captured = time.monotonic()
    partition = ph.partition(graph, count)
    slowest = max(segment.flops for segment in partition.segments)
    cut = time.monotonic()
    grown = resident_mb() - before
    largest = max(segment.flops for segment in ph.partition(graph, "finest").segments)
    blocks = ph.partition(graph)
    return {
        "model": name,
        "parameters": graph.num_parameters,
        "nodes": len(graph.nodes),
        "capture_seconds": round(captured - start, 1),
        "partition_seconds": round(cut - captured, 2),
        "caller_rss_mb": round(grown, 1),
        "segments": count,
        "slowest_over_bound": round(slowest / max(graph.flops / count, largest), 3),
        "blocks": len(blocks.segments),
        "codes": len(blocks.codes),
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        from results_file import save

        rows = []
        for name, count in CASES:
            done = subprocess.run(
                [sys.executable, __file__, name, str(count)], capture_output=True, text=True, check=True
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
        print(save("capture", rows))
