"""Keys of randomness: every random operation of every microbatch of every step has its own seed.

In: the run's seed, the step, the operation and the microbatch. Out: the seed the generator gets just before that operation.
It does not depend on how the model is cut, on the strategy or on what ran before: a recomputation or a resumed run draws the
same.
"""

import zlib
from collections.abc import Callable

import torch

_MASK = (1 << 64) - 1


def fold(number: int) -> int:
    """As a generator takes it, which refuses larger ones."""
    return number & (_MASK >> 1)


def random_seed(seed: int, step: int, operation: int | str, microbatch: int) -> int:
    """The seed of one random operation: its ordinal in the graph (in an opaque block: its name), counted from 0."""
    if isinstance(operation, str):
        operation = zlib.crc32(operation.encode()) | 1 << 32
    mixed = seed & _MASK
    for part in (step, operation, microbatch):
        mixed = _mix(mixed ^ _mix(part + 1))
    return mixed


def _mix(number: int) -> int:
    """splitmix64: every bit of the result depends on every bit of the number."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def key_generator(generator: torch.Generator, seed: int, step: int, microbatch: int) -> Callable[[int | str], None]:
    """What a segment calls before each random operation: sets the generator by the operation's key."""
    set_seed = generator.manual_seed

    def rng(operation: int | str) -> None:
        set_seed(random_seed(seed, step, operation, microbatch))

    return rng
