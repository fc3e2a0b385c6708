"""A store without its model: what is in it, whether it is whole, its weights for others, its space back.

In: the directory of a run, of one process or of several ranks. Out: a description, a list of what is damaged, a checkpoint,
bytes freed.
"""

import contextlib
import ctypes
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.checkpoint import Entry, write_checkpoint
from packhorse.errors import StoreError
from packhorse.memory import Ledger, Pool, map_bytes
from packhorse.store import GRADIENT, DiskStore
from packhorse.store.block_files import BlockFiles
from packhorse.store.files import unseal
from packhorse.store.runs import find_earlier


def _find_stores(directory: str | Path) -> list[Path]:
    """The store of a run, or those of its ranks; of several runs the farthest."""
    path = Path(directory)
    if (path / "manifest.json").is_file():
        return [path]
    earlier = find_earlier(path, "")
    if earlier is None:
        raise StoreError(f"{directory} is no store: there is no manifest.json in it, nor the stores of several ranks")
    return list(earlier.ranks)


@contextmanager
def _opened(directory: Path) -> Iterator[DiskStore]:
    """The store, locked, as the last commit left it."""
    store = DiskStore(directory)
    try:
        store.open_as_it_is(Pool(Ledger()))
        yield store
    finally:
        store.close()


def describe_store(directory: str | Path) -> dict[str, Any]:
    """What a run holds. Looks, without a lock, at one that may be under way."""
    first, *others = [_describe(path) for path in _find_stores(directory)]
    for other in others:
        first["step"] = min(first["step"], other["step"])
        first["bytes"] = {
            k: first["bytes"].get(k, 0) + other["bytes"].get(k, 0) for k in first["bytes"] | other["bytes"]
        }
        first["bytes_on_disk"] += other["bytes_on_disk"]
        first["blocks"] += other["blocks"]
        first["closed"] = first["closed"] and other["closed"]
        first["in_use_by"] = first["in_use_by"] or other["in_use_by"]
    return {**first, "ranks": 1 + len(others)}


def _describe(path: Path) -> dict[str, Any]:
    store = DiskStore(path)
    try:
        manifest = store.read_manifest()
        assert manifest is not None
        header = unseal(path / manifest["blocks"] / "header.json")
        holder = store.lock.holder()
        unfinished = holder is None and store.find_unfinished() is not None
        done = store.journal.records[-1]["segment"] if unfinished else None
    finally:
        store.close()
    kinds: dict[str, int] = {}
    for block in header["blocks"]:
        elements = sum(torch.Size(shape).numel() for _, shape, *_ in block["slots"])
        for kind, dtype in block["kinds"].items():
            kinds[kind] = kinds.get(kind, 0) + elements * getattr(torch, dtype).itemsize
    return {
        "step": manifest["facts"]["step"],
        "model": header["model"],
        "optimizer": header["optimizer"],
        "tensors": len(header["tensors"]),
        "elements": sum(torch.Size(t["shape"]).numel() for t in header["tensors"]),
        "blocks": len(header["blocks"]),
        "versions": header["versions"],
        "rolls_forward": header["versions"] == 1 and manifest["checked"],
        "interrupted": {"step": manifest["facts"]["step"] + 1, "updated_from_segment": done} if unfinished else None,
        "bytes": kinds,
        "bytes_on_disk": _used_bytes(path),
        "committed": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / "manifest.json").stat().st_mtime)),
        "closed": not manifest["open"],
        "in_use_by": holder,
    }


def check_store(directory: str | Path) -> tuple[int, list[str], bool]:
    """Reads everything that is committed: how many bytes that was, what is wrong with them, and whether checksums tell."""
    found = [_check(path) for path in _find_stores(directory)]
    counts, problems, checked = zip(*found, strict=True)
    return sum(counts), [problem for rank in problems for problem in rank], all(checked)


def _check(path: Path) -> tuple[int, list[str], bool]:
    with _opened(path) as store:
        problems: list[str] = []
        count = 0
        for block in store.files.blocks.values():
            for kind, dtype in block.kinds.items():
                runs, sums = store.files.places.runs(block, kind, write=False), store.files.sums[block.name, kind]
                for unit, (start, stop) in enumerate(block.units):
                    if sums[unit] is None and store.files.checked:
                        continue  # a state before the first step
                    buffer = map_bytes((stop - start) * dtype.itemsize)
                    count += buffer.nbytes
                    try:
                        store.files.read(block, kind, unit, buffer, runs, sums[unit])
                    except StoreError as error:
                        problems.append(str(error))
        try:
            count += sum(tensor.nbytes for tensor in store.read_small().values())
        except StoreError as error:
            problems.append(str(error))
        return count, problems, store.files.checked


def export_store(directory: str | Path, target: str | Path) -> list[Path]:
    """Writes the stored model as safetensors, as `Trainer.save` would."""
    with ExitStack() as stack:
        stores = [stack.enter_context(_opened(path)) for path in _find_stores(directory)]
        header, steps = stores[0].read_header(), {store.committed_step for store in stores}
        if len(steps) > 1:
            raise StoreError(
                f"the ranks' stores in {directory} ended at steps {sorted(steps)}; resume the run, which goes on from a step "
                "that all of them have, and export then"
            )
        for store in stores:
            if store.journal.intent is not None:
                step = store.journal.intent["facts"]["step"]
                raise StoreError(
                    f"{directory} holds step {step} and parts of step {step + 1}, which was interrupted; resume the run, "
                    "which finishes that step, and export then"
                )
        small = stores[0].read_small()
        saved = [t for t in header["tensors"] if t["saved"]]
        entries = [Entry(t["name"], tuple(t["shape"]), getattr(torch, t["dtype"])) for t in saved]
        holders = {entry.name: _find_holder(stores, entry) for entry in entries if f"buffer:{entry.name}" not in small}

        def read_pieces(name: str) -> Iterator[Tensor]:
            if f"buffer:{name}" in small:
                yield small[f"buffer:{name}"].contiguous().view(-1)
            else:
                yield from holders[name].read_pieces(name)

        return write_checkpoint(target, entries, read_pieces, header.get("config"))


def _find_holder(stores: Sequence[DiskStore], entry: Entry) -> BlockFiles:
    """The rank that has a tensor."""
    for store in stores:
        for block in store.files.blocks.values():
            if any(slot.name == entry.name and slot.shape == entry.shape for slot in block.slots):
                return store.files
    raise StoreError(
        f"no rank has all of {entry.name}: each keeps a part of it; resume the run with one process, or with any number of "
        "ranks, and let trainer.save write it"
    )


def reclaim(directory: str | Path) -> int:
    """Gives back what the last commit does not need: remains of steps and attempts, and the other version of every block."""
    stores = _find_stores(directory)
    if len(stores) > 1:
        raise StoreError(
            f"{directory} holds a run of {len(stores)} ranks, whose earlier versions are what they may have in common after "
            "one of them died; resume it with one process, and reclaim then"
        )
    (path,) = stores
    with _opened(path) as store:
        before = _used_bytes(path)
        leftovers = list(path.glob("*.new"))
        if store.journal.intent is None:  # else they are what finishing the step takes
            leftovers += [path / "stash.bin", store.files.path / f"{GRADIENT}.bin", store.journal.path]
            leftovers += [store.journal.tensor_path]
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
        for other in path.glob("blocks-*"):
            if other != store.files.path:
                shutil.rmtree(other)
        for kind, offset, nbytes in store.files.places.unused():
            _punch_hole(store.files.files[kind].descriptor, offset, nbytes)
        return before - _used_bytes(path)


def _used_bytes(path: Path) -> int:
    """Disk space of all files; one that goes away while they are counted, as in a run, counts nothing."""
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_blocks * 512 if file.is_file() else 0
    return total


def _punch_hole(descriptor: int, offset: int, nbytes: int) -> None:
    """Frees a part of a file, where that can be done; the next run that writes there takes it again."""
    keep_size, punch_hole = 1, 2
    try:
        fallocate = ctypes.CDLL(None).fallocate
    except (AttributeError, OSError):  # not Linux
        return
    fallocate(descriptor, keep_size | punch_hole, ctypes.c_longlong(offset), ctypes.c_longlong(nbytes))
