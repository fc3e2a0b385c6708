"""What a user asked of training apart, checked before anything is made."""

import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from packhorse.device import find_device
from packhorse.errors import BatchError, PackhorseError, RanksError
from packhorse.memory import Ledger, Pool
from packhorse.ranks.shape import Ranks


def check_choices(
    mode: str, parts: int | None, cuts: Sequence[str], num_classes: int, refine: int, noise: float, seed: int
) -> None:
    if mode not in ("sequential", "parallel"):
        raise PackhorseError(f"mode is {mode!r}, expected one of sequential, parallel")
    if (parts is None) == (not cuts):
        raise PackhorseError("give either parts, how many, or cuts, the modules after which to cut")
    if isinstance(cuts, str):
        raise PackhorseError(f"cuts is the text {cuts!r}, expected a list of module names")
    if not is_count(num_classes, 2):
        raise PackhorseError(f"num_classes is {num_classes!r}, expected a number of at least 2")
    if not is_count(refine, 0):
        raise PackhorseError(f"refine is {refine!r}, expected a number of epochs, or 0 for none")
    if not _is_number(noise) or noise < 0:
        raise PackhorseError(f"noise is {noise!r}, expected a number of standard deviations, or 0 for none")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise PackhorseError(f"seed is {seed!r}, expected a whole number")


def check_callable(name: str, given: Any, what: str) -> None:
    if given is not None and not callable(given):
        raise PackhorseError(f"{name} is {given!r}, expected a function, {what}, or None")


def check_directory(name: str, given: Any) -> None:
    if not isinstance(given, (str, os.PathLike)):
        raise PackhorseError(f"{name} is {given!r}, expected a directory, as text or a Path")


def check_device(device: Any, mode: str) -> None:
    """Whether it is there, unless processes are forked later, which cannot use an accelerator that this one has asked for."""
    if device is None:
        return
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PackhorseError(
            f"device is {device!r}, expected one that torch knows, such as 'cpu' or 'cuda:0'; leave it out to use what there is"
        ) from error
    if mode != "parallel":
        find_device(wanted, Pool(Ledger()))


def check_ranks(ranks: Any, size: int) -> None:
    if ranks is None:
        return
    if not isinstance(ranks, Ranks):
        raise RanksError(f"ranks is {ranks!r}, expected ph.Ranks, such as ph.Ranks(data={size}), or None")
    ranks.check_size(size)


def check_counts(given: Any, num_parts: int, name: str) -> list[int]:
    """One for each part, each at least 1."""
    return [_check_count(count, i, name) for i, count in enumerate(one_each(given, num_parts, name))]


def check_batch_sizes(given: Any, num_parts: int) -> list[int | None]:
    """None: as the loader's."""
    found = one_each(given, num_parts, "batch_sizes")
    return [None if size is None else _check_count(size, i, "batch_sizes") for i, size in enumerate(found)]


def _check_count(count: Any, part: int, name: str) -> int:
    if not is_count(count, 1):
        raise PackhorseError(f"{name} is {count!r} for part {part}, expected a whole number of at least 1")
    return operator.index(count)


def check_rates(given: Any, num_parts: int) -> list[float | None]:
    found = one_each(given, num_parts, "rates")
    for i, rate in enumerate(found):
        if rate is not None and (not _is_number(rate) or rate < 0):
            raise PackhorseError(
                f"rates is {rate!r} for part {i}, expected a learning rate, or None for the optimizer's"
            )
    return found


def one_each(given: Any, num_parts: int, name: str) -> list[Any]:
    """One for each part, from one for all or as many as parts."""
    if getattr(given, "ndim", 0):  # an array of numbers
        given = given.tolist()
    if not isinstance(given, (list, tuple)):
        return [given] * num_parts
    if len(given) != num_parts:
        raise PackhorseError(
            f"{name} has {len(given)} entries for {num_parts} parts; give one for all, or one for each"
        )
    return list(given)


def check_loader(loader: Any, *, once: bool = False) -> None:
    """Training goes through it once an epoch, for each part that reads it, and once more for what the first makes of it."""
    if isinstance(loader, Iterator) and not once:
        raise BatchError(
            f"the loader is a {type(loader).__name__}, which can be gone through once, but training does so every epoch; give "
            "a list, a DataLoader, or an object whose __iter__ begins anew"
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise BatchError(f"the loader is a {type(loader).__name__}, expected something that yields batches (x, y)")


def is_count(value: Any, least: int) -> bool:
    """Whole numbers of other libraries, too."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:  # also what arrays say, unless they hold a single whole number
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
