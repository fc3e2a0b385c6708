"""What operations allocate, counted while they run.

In: a block of code, and the tensors that were there before. Out: live and peak bytes of storages that came since.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that appear and disappear while it is on; those of `known` tensors do not count."""

    def __init__(self, known: Iterable[Tensor], storages: Iterable[int] = ()):
        super().__init__()
        self.live = self.peak = 0
        self._known = {*storages, *(tensor.untyped_storage()._cdata for tensor in known)}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import it, 60 MB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, storage: int, nbytes: int) -> None:
        self._known.discard(storage)
        self.live -= nbytes
