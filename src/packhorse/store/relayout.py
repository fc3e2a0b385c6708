"""A store laid out anew: the same tensors in other blocks, or in another number of versions.

In: the files as they are, and others, empty. Out: everything the first hold, in the second, a unit at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from packhorse.errors import StoreError
from packhorse.memory import Pool
from packhorse.store.block_files import BlockFiles
from packhorse.store.blocks import GRADIENT, MASTER, WORKING, Block, Slot
from packhorse.store.places import Runs


def copy_blocks(old: Sequence[BlockFiles], new: BlockFiles, pool: Pool) -> None:
    """`old` may be several, each with some tensors, or with pieces of them."""
    for block in new.blocks.values():
        for kind, dtype in block.kinds.items():
            if kind in (WORKING, GRADIENT):
                continue
            for unit, (start, stop) in enumerate(block.units):
                buffer = pool.take((stop - start) * dtype.itemsize, "update buffers")
                buffer.zero_()
                if _gather(old, block, kind, start, stop, buffer.view(dtype)):
                    runs = new.places.runs(block, kind, write=True)
                    new.write(block, kind, unit, buffer, runs)
                    if kind == MASTER:
                        write_working(new, block, unit, buffer.view(dtype), runs, pool)
                pool.give(buffer, "update buffers")
        new.publish(block)


def write_working(files: BlockFiles, block: Block, unit: int, masters: Tensor, runs: Runs, pool: Pool) -> int:
    """The copy that segments run with, cast from masters that go to `runs`; none for a block that runs with those.

    Returns how many bytes that was.
    """
    if WORKING not in block.kinds:
        return 0
    dtype = block.kinds[WORKING]
    buffer = pool.take(masters.numel() * dtype.itemsize, "update buffers")
    try:
        cast = buffer[: masters.numel() * dtype.itemsize]
        cast.view(dtype).copy_(masters)
        files.write(block, WORKING, unit, cast, runs)
        return cast.nbytes
    finally:
        pool.give(buffer, "update buffers")


def _gather(old: Sequence[BlockFiles], block: Block, kind: str, start: int, stop: int, target: Tensor) -> bool:
    """Fills a unit with what the old files hold of its tensors; false if they hold nothing."""
    known = not block.slots and kind == MASTER  # a part without tensors is written all the same
    for slot in block.slots:
        a, b = max(slot.start, start), min(slot.stop, stop)
        if a >= b:
            continue
        at = slot.offset - slot.start  # from elements of the block to those of the tensor
        for files in old:
            held = _find(files, slot, kind)
            if held is None:
                continue
            first, last = max(a + at, held.offset), min(b + at, held.offset + held.numel)
            if first < last:
                piece = files.read_elements(slot.name, kind, first - held.offset, last - held.offset)
                target[first - at - start : last - at - start] = piece
                known = True
    return known


def _find(files: BlockFiles, wanted: Slot, kind: str) -> Slot | None:
    """What files hold of a tensor in one kind; None if nothing."""
    try:
        source, held = files.find(wanted.name)
    except StopIteration:
        return None
    if not source.states and kind != MASTER:
        return None  # not updated so far, or by another rank: its states begin now, or are there
    if kind not in source.kinds:
        raise StoreError(
            f"{files.path.parent} has no optimizer state {kind!r} of {wanted.name}; it was made with other options"
        )
    if all(s is None for s in files.sums[source.name, kind]) and files.checked:
        return None  # never written: a state before the first step
    if held.shape == wanted.shape and held.stride != wanted.stride:
        raise StoreError(f"{wanted.name} lies in {files.path.parent} in another order of dimensions")
    return held


def find_difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first thing in which the stored model and this one differ; nothing if they agree."""
    for key in ("model", "optimizer"):
        if wanted[key] != found[key]:
            return f"{key} is {found[key]} there and {wanted[key]} here"
    there, here = ({t["name"]: (list(t["shape"]), t["dtype"]) for t in h["tensors"]} for h in (found, wanted))
    for name in {**here, **there}:
        if there.get(name) != here.get(name):
            return f"{name} is {there.get(name, 'not')} there and {here.get(name, 'not')} here"
    return ""
