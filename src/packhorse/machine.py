"""Machines: what hardware can hold and how fast it is, measured here or described in a file.

In: this computer, or a TOML file. Out: `Machine`: bytes of each tier, rates of compute and of every link. A plan needs nothing
else of the hardware, so it can be made for a machine one does not have.
"""

import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from packhorse.errors import MachineError, PackhorseError, StoreError
from packhorse.memory import Tier, available_bytes, map_bytes, total_bytes
from packhorse.store.files import File, FileSystem, as_bytes, digest
from packhorse.units import format_bytes, parse_bytes

LINKS = ("device", "host", "link", "read", "write", "network")
FORMAT = 1  # of what is kept of a probe
UNKNOWN_DISK = 200e6  # bytes a second, where the disk cannot be measured
LARGE = 32 << 20  # bytes from which on malloc takes a piece from the system, and gives it back, every time
DESCRIPTIONS = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Machine:
    """`matmul`: FLOP/s that large matrix products reach, by precision. `bandwidth`: bytes/s of

    device   the memory the device computes in
    host     the host's memory, as the update moves through it
    link     between host and device, each way; on a machine without accelerator there is none
    read, write   the disk
    network  between ranks, each way
    """

    name: str
    device: str  # "cpu" or the accelerator's type
    cores: int
    memory: Mapping[Tier, int]
    matmul: Mapping[str, float]
    bandwidth: Mapping[str, float]
    kernels: Mapping[str, float] = field(
        default_factory=dict
    )  # measured rates of families (see `price`), forward and back
    devices: int = 1
    nodes: int = 1
    latency: float = 0.0  # of the network, in seconds
    is_here: bool = False
    sources: tuple[str, ...] = ()

    @classmethod
    def load(cls, file: str | Path) -> "Machine":
        """A machine described in a TOML file, or one that comes with packhorse, by name."""
        path = Path(file)
        if not path.suffix:
            path = DESCRIPTIONS / f"{file}.toml"
        try:
            fields = tomllib.loads(path.read_text())
        except FileNotFoundError:
            known = ", ".join(sorted(p.stem for p in DESCRIPTIONS.glob("*.toml")))
            raise MachineError(
                f"there is no machine {str(file)!r}: give a TOML file, 'here', or one of {known}"
            ) from None
        except tomllib.TOMLDecodeError as error:
            raise MachineError(f"{path} is no TOML: {error}") from None
        return _read(fields, str(path))

    @classmethod
    def probe(cls, directory: str | Path | None = None, *, device: str | None = None, fresh: bool = False) -> "Machine":
        """This computer, measured in a few seconds; the result is kept for the next time.

        `directory`: the disk to measure. `device`: what computes, "cpu" or an accelerator's type; None: the accelerator if
        there is one.
        """
        place = Path(directory) if directory is not None else Path(tempfile.gettempdir())
        while not place.exists():
            place = place.parent
        device = device or _find_device()
        cache = _cache_path(place, device)
        if cache.is_file() and not fresh:
            try:
                return _read_cached(json.loads(cache.read_text()), place)
            except (ValueError, KeyError, TypeError):
                pass  # written by another version: measured anew
        fields = _measure_in_child(place, device)
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(json.dumps(fields))
        except OSError:
            pass  # a home that cannot be written to: measured again next time
        return _read_cached(fields, place)

    def rate(self, family: str, precision: str | None = None, *, backward: bool = False) -> float:
        """FLOP/s of a family of products, bytes/s of any other: measured, or what the machine's own figures make likely."""
        key = ".".join([family, *([precision] if precision else []), *(["backward"] if backward else [])])
        if key in self.kernels:
            return self.kernels[key]
        if backward:
            return self.rate(family, precision)
        if precision is not None:
            return self.matmul[precision] * (0.5 if family == "attention" else 1.0)
        return self.bandwidth["host" if family == "update" else "device"]

    def linked(self, rate: float, latency: float = 0.0, work: float | None = None) -> "Machine":
        """Several of the same, with such a network between them; `work`: bytes for which it takes a second of a core."""
        kernels = self.kernels if work is None or self.device != "cpu" else {**self.kernels, "beside network": work}
        return replace(self, bandwidth={**self.bandwidth, "network": rate}, latency=latency, kernels=kernels)

    def slowed(self, rate: float | None) -> "Machine":
        """The same with a disk that moves no more than so many bytes a second."""
        if rate is None:
            return self
        disk = {link: min(rate, self.bandwidth[link]) for link in ("read", "write")}
        return replace(self, bandwidth={**self.bandwidth, **disk})

    def without_disk(self) -> "Machine":
        """The same with a disk of any size: on one that a store lies on already, what is free says little."""
        return replace(self, memory={tier: n for tier, n in self.memory.items() if tier != "disk"})

    def __str__(self) -> str:
        return self.name


# -- files


def _read(fields: Mapping[str, Any], where: str) -> Machine:
    known = {"name", "device", "cores", "devices", "nodes", "memory", "matmul", "bandwidth", "latency", "sources"}
    for key in sorted(fields.keys() - known):
        raise MachineError(f"{where}: unknown entry {key!r}, expected some of {', '.join(sorted(known))}")
    for key in ("name", "device", "cores", "memory", "matmul", "bandwidth"):
        if key not in fields:
            raise MachineError(f"{where}: {key!r} is missing")
    for key in ("memory", "matmul", "bandwidth"):
        if not isinstance(fields[key], dict):
            raise MachineError(f"{where}: {key} is a {type(fields[key]).__name__}, expected a table [{key}]")
    on_cpu = fields["device"] == "cpu"
    tiers = ("host", "disk") if on_cpu else ("device", "host", "disk")
    memory = {tier: _amount(fields["memory"], tier, f"{where}: memory") for tier in tiers}
    matmul = {p: _rate(fields["matmul"], p, f"{where}: matmul", 1e8, 1e17) for p in ("fp32", "bf16", "fp16")}
    is_alone = fields.get("nodes", 1) == 1 and fields.get("devices", 1) == 1
    wanted = [k for k in LINKS if not (k == "network" and is_alone) and not (k == "link" and on_cpu)]
    bandwidth = {k: _rate(fields["bandwidth"], k, f"{where}: bandwidth", 1e5, 1e14) for k in wanted}
    for key in ("cores", "devices", "nodes"):
        count = fields.get(key, 1)
        if not isinstance(count, int) or not 1 <= count <= 100_000:
            raise MachineError(f"{where}: {key} is {count!r}, expected a number from 1 to 100000")
    return Machine(
        str(fields["name"]),
        str(fields["device"]),
        fields["cores"],
        memory,
        matmul,
        bandwidth,
        devices=fields.get("devices", 1),
        nodes=fields.get("nodes", 1),
        latency=float(fields.get("latency", 0.0)),
        sources=tuple(fields.get("sources", ())),
    )


def _amount(table: Mapping[str, Any], tier: str, where: str) -> int:
    if tier not in table:
        raise MachineError(f"{where}.{tier} is missing, expected an amount such as '16GB'")
    try:
        nbytes = parse_bytes(table[tier])
    except PackhorseError as error:
        raise MachineError(f"{where}.{tier}: {error}") from None
    if not 1e8 <= nbytes <= 1e18:
        raise MachineError(f"{where}.{tier} is {format_bytes(nbytes)}, expected an amount such as '16GB'")
    return nbytes


def _rate(table: Mapping[str, Any], key: str, where: str, least: float, most: float) -> float:
    found = table.get(key)
    if found is None:
        raise MachineError(f"{where}.{key} is missing, expected a rate a second, such as {math.sqrt(least * most):.0e}")
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not least <= found <= most:
        raise MachineError(f"{where}.{key} is {found!r}, expected a rate a second between {least:.0e} and {most:.0e}")
    return float(found)


def _read_cached(fields: Mapping[str, Any], place: Path) -> Machine:
    machine = Machine(**{**fields, "sources": tuple(fields["sources"])})
    memory = {**machine.memory, "host": total_bytes(), "disk": shutil.disk_usage(place).free}
    return Machine(**{**fields, "memory": memory, "sources": machine.sources})


def _find_device() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


def _cache_path(place: Path, device: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    disk = os.stat(place).st_dev
    key = f"{FORMAT}-{platform.node()}-{torch.__version__}-{device}-{torch.get_num_threads()}-{disk}"
    return home / "packhorse" / f"machine-{''.join(c if c.isalnum() or c in '.-' else '_' for c in key)}.json"


# -- measuring

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _measure_in_child(place: Path, device: str) -> dict[str, Any]:
    """In a process of its own, whose memory is not this one's."""
    command = [sys.executable, "-m", "packhorse.machine", str(place), str(torch.get_num_threads()), device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise MachineError(f"this machine could not be measured: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout))


def _measure(place: Path, device: str) -> Machine:
    matmul, kernels = {}, {}
    for precision, dtype in _DTYPES.items():
        matmul[precision], kernels[f"matmul.{precision}.backward"] = _measure_matmul(device, dtype)
    kernels |= _measure_kernels(device)
    small = torch.randn(64, 1024, device=device)  # where starting a kernel, on all cores, takes longer than running it
    kernels["launch"], kernels["launch.backward"] = _time(device, functional.relu, (small,))
    host = _measure_copy("cpu")
    kernels["update"] = _measure_update()
    read, write, beside = _measure_disk(place, device)
    if device == "cpu":
        kernels |= {"fresh": _measure_fresh(), "beside disk": beside}
    bandwidth = {
        "device": host if device == "cpu" else _measure_copy(device),
        "host": host,
        "read": read,
        "write": write,
    }
    memory = {"host": total_bytes(), "disk": shutil.disk_usage(place).free}
    if device != "cpu":
        bandwidth["link"] = _measure_link(device)
        memory["device"] = torch.accelerator.get_memory_info()[1]
    return Machine(
        f"this machine ({torch.get_num_threads()} threads)",
        device,
        torch.get_num_threads(),
        memory,
        matmul,
        bandwidth,
        kernels,
        is_here=True,
        sources=(f"measured {time.strftime('%Y-%m-%d')}",),
    )


def _typical(run: Callable[[], Any], seconds: float = 0.25) -> float:
    """The median of a few runs, after one that does not count."""
    run()
    times: list[float] = []
    while not times or sum(times) < seconds:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _measure_matmul(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s forward, and of the two products of backward together, of a layer four times as wide as its input."""
    rows, size, most = (512, 64, 1024) if device == "cpu" else (4096, 1024, 8192)
    while True:  # some precisions are a hundred times slower than others: grow until it takes long enough to tell
        x = torch.randn(rows, size, device=device).to(dtype)
        w = torch.randn(4 * size, size, device=device).to(dtype)
        forward, both = _time(device, functional.linear, (x, w))
        if forward + both > 0.2 or size >= most:
            forward, both = _time(device, functional.linear, (x, w), 0.5)
            flops = 8 * rows * size**2
            return flops / forward, 2 * flops / both
        size *= 2


def _time(
    device: str, run: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, ...], budget: float = 0.05
) -> tuple[float, float]:
    """Seconds forward and backward."""
    leaves = tuple(t.requires_grad_() for t in operands)
    forward = _typical(lambda: _settle(device, run(*leaves)), budget)
    result = run(*leaves)
    seed = torch.ones_like(result)
    return forward, _typical(
        lambda: _settle(device, torch.autograd.grad(result, leaves, seed, retain_graph=True)[0]), budget
    )


def _measure_kernels(device: str) -> dict[str, float]:
    """Rates of families of kernels, each by one that is typical for it, forward and backward."""
    wide = torch.randn(2048, 1024, device=device)
    image = torch.randn(4, 64, 56, 56, device=device)
    filters = torch.randn(64, 64, 3, 3, device=device)
    heads = torch.randn(2, 16, 512, 64, device=device)
    logits, targets = torch.randn(512, 8192, device=device), torch.randint(8192, (512,), device=device)
    ones = torch.ones(1024, device=device)
    cases: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], float]] = {
        "convolution.fp32": (
            lambda x, w: functional.conv2d(x, w, padding=1),
            (image, filters),
            2 * 4 * 56 * 56 * 64 * 64 * 9,
        ),
        "attention.fp32": (
            lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
            (heads,),
            2 * 2 * 16 * 512 * 512 * 64,
        ),
        "softmax": (lambda x: functional.cross_entropy(x, targets), (logits,), logits.nbytes),
        "norm": (lambda x, w: functional.layer_norm(x, (1024,), w, w), (wide, ones), 2 * wide.nbytes),
        "transcendental": (functional.gelu, (wide,), 2 * wide.nbytes),
        "elementwise": (functional.relu, (wide,), 2 * wide.nbytes),
        "pool": (lambda x: functional.max_pool2d(x, 2), (image,), 1.25 * image.nbytes),
        "random": (lambda x: functional.dropout(x, 0.1), (wide,), 2 * wide.nbytes),
    }
    rates = {}
    for name, (run, operands, work) in cases.items():
        forward, backward = _time(device, run, operands)
        products = len(operands) if "." in name else 1.5  # passes over what forward moved once
        rates[name], rates[f"{name}.backward"] = work / forward, products * work / backward
    return rates


def _settle(device: str, result: torch.Tensor) -> torch.Tensor:
    if device != "cpu":
        torch.accelerator.synchronize()
    return result


def _measure_copy(device: str) -> float:
    """Bytes read and written a second by an addition in place."""
    a, b = (torch.zeros(16 << 20, device=device) for _ in range(2))
    return 3 * a.nbytes / _typical(lambda: _settle(device, a.add_(b)))


def _measure_update() -> float:
    """Bytes a second that an update moves on one core, as it has beside compute: parameters, gradients, two moments."""
    threads = torch.get_num_threads()
    parameter = torch.zeros(16 << 20, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    torch.set_num_threads(1)
    try:
        return 7 * parameter.nbytes / _typical(optimizer.step)
    finally:
        torch.set_num_threads(threads)


def _measure_fresh() -> float:
    """Bytes a second at which new memory can be had: the system hands out large pieces page by page."""
    size = 2 * LARGE
    kept = torch.empty(size, dtype=torch.uint8)
    new = _typical(lambda: torch.empty(size, dtype=torch.uint8).fill_(1)) - _typical(lambda: kept.fill_(1))
    return size / max(new, 1e-9)


def _measure_link(device: str) -> float:
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    return host.nbytes / _typical(lambda: _settle(device, there.copy_(host, non_blocking=True)))


def _measure_disk(place: Path, device: str, nbytes: int = 128 << 20) -> tuple[float, float, float]:
    """Bytes a second of direct reads and writes, as a store makes them, in pieces of 4 MiB.

    And how many of them, with their checksums, take a second of a core: where cores also compute, compute waits for that.
    """
    path = place / f".packhorse-probe-{os.getpid()}"
    file: File | None = None
    try:
        file = File(FileSystem(), path, nbytes, create=True)
        (write, writing), (read, reading) = (_move_all(move, nbytes) for move in (file.write, file.read))
        return nbytes / read, nbytes / write, 2 * nbytes / (writing + reading) if device == "cpu" else math.inf
    except StoreError:  # full, or not ours to write: a slow disk is assumed
        return UNKNOWN_DISK, UNKNOWN_DISK, math.inf
    finally:
        if file is not None:
            file.close()
        path.unlink(missing_ok=True)


def _move_all(move: Callable[[torch.Tensor, int, str], None], nbytes: int, piece: int = 4 << 20) -> tuple[float, float]:
    """Seconds that passed for moving, and those of the core for that and for checksums."""
    buffer = map_bytes(nbytes).fill_(1)  # not all of it stays in a cache
    passed, started = 0.0, time.thread_time()
    for at in range(0, nbytes, piece):
        part, begun = buffer[at : at + piece], time.perf_counter()
        move(part, at, "probe")
        passed += time.perf_counter() - begun
        digest(as_bytes(part))
    return passed, time.thread_time() - started


def find_machine(name: str | Path | Machine | None, directory: str | Path | None = None) -> Machine:
    """A machine as people name it: None or `here`, a description, a file."""
    if isinstance(name, Machine):
        return name
    return Machine.probe(directory) if name in (None, "here") else Machine.load(name)


def free_bytes(machine: Machine) -> int:
    """Host memory a plan may use without a budget: what is available here, or all of a machine elsewhere."""
    return available_bytes() if machine.is_here else machine.memory["host"]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(asdict(_measure(Path(sys.argv[1]), sys.argv[3]))))
