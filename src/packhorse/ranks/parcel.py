"""A parcel: several tensors as one run of bytes, with their strides, and with some left out.

Kernels may round differently on tensors that lie differently, so what is unpacked lies as what was packed did.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, as torch aligns what it allocates
HEADER = 192  # bytes of a tensor: whether it is there, and its strides


@dataclass(frozen=True)
class Parcel:
    """Names, shapes and dtypes of what is packed; known to both sides."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @cached_property
    def _starts(self) -> list[int]:
        starts = [HEADER * len(self.names)]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            starts.append(starts[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
        return starts

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def pack(self, tensors: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Into so many bytes. What has no tensor is marked as missing."""
        for i, (name, shape, dtype) in enumerate(zip(self.names, self.shapes, self.dtypes, strict=True)):
            header, tensor = buffer[HEADER * i : HEADER * (i + 1)].view(torch.int64), tensors.get(name)
            if tensor is None:
                header[0] = 0
                continue
            tensor = tensor.detach()
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype}{list(tensor.shape)}, but {dtype}{list(shape)} was to be sent"
                )
            stride = _dense_stride(tensor)
            header[: 1 + len(shape)] = torch.tensor([1, *stride])
            self._part(buffer, i).as_strided(shape, stride, self._offset(i, dtype)).copy_(tensor)

    def unpack(self, buffer: Tensor) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for i, (name, shape, dtype) in enumerate(zip(self.names, self.shapes, self.dtypes, strict=True)):
            present, *stride = buffer[HEADER * i : HEADER * (i + 1)].view(torch.int64)[: 1 + len(shape)].tolist()
            found[name] = self._part(buffer, i).as_strided(shape, stride, self._offset(i, dtype)) if present else None
        return found

    def _part(self, buffer: Tensor, i: int) -> Tensor:
        return buffer[: self.nbytes].view(self.dtypes[i])

    def _offset(self, i: int, dtype: torch.dtype) -> int:
        return self._starts[i] // dtype.itemsize


def _dense_stride(tensor: Tensor) -> Sequence[int]:
    """Its own if it lies without gaps and overlaps, else those of a contiguous copy."""
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
