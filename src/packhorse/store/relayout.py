"""A store laid out anew: the same tensors in other blocks, or in another number of versions.

In: the files as they are, and others, empty. Out: everything the first hold, in the second, a unit at a time.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from packhorse.errors import StoreError
from packhorse.memory import Pool
from packhorse.store.block_files import BlockFiles
from packhorse.store.blocks import GRADIENT, MASTER, Block


def copy_blocks(old: BlockFiles, new: BlockFiles, pool: Pool) -> None:
    for block in new.blocks.values():
        for kind, dtype in block.kinds.items():
            if kind == GRADIENT:
                continue
            for unit, (start, stop) in enumerate(block.units):
                buffer = pool.take((stop - start) * dtype.itemsize, "update buffers")
                buffer.zero_()
                if _gather(old, block, kind, start, stop, buffer.view(dtype)):
                    new.write(block, kind, unit, buffer, new.places.runs(block, kind, write=True))
                pool.give(buffer, "update buffers")
        new.publish(block)


def _gather(old: BlockFiles, block: Block, kind: str, start: int, stop: int, target: Tensor) -> bool:
    """Fills a unit with what the old files hold of its tensors; false if they hold nothing."""
    known = False
    for slot in block.slots:
        a, b = max(slot.start, start), min(slot.stop, stop)
        if a >= b:
            continue
        source, place = old.find(slot.name)
        if len(source.kinds) == 1 and kind != MASTER:
            continue  # not updated so far: its states begin now
        if kind not in source.kinds:
            raise StoreError(
                f"{old.path.parent} has no optimizer state {kind!r} of {slot.name}; it was made with other options"
            )
        if all(s is None for s in old.sums[source.name, kind]) and old.checked:
            continue  # never written: a state before the first step
        if place.stride != slot.stride:
            raise StoreError(f"{slot.name} lies in {old.path.parent} in another order of dimensions")
        target[a - start : b - start] = old.read_elements(slot.name, kind, a - slot.start, b - slot.start)
        known = True
    return known


def find_difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first thing in which the stored model and this one differ; nothing if they agree."""
    for key in ("model", "optimizer"):
        if wanted[key] != found[key]:
            return f"{key} is {found[key]} there and {wanted[key]} here"
    there, here = ({t["name"]: (t["shape"], t["dtype"]) for t in h["tensors"]} for h in (found, wanted))
    for name in {**here, **there}:
        if there.get(name) != here.get(name):
            return f"{name} is {there.get(name, 'not')} there and {here.get(name, 'not')} here"
    return ""
