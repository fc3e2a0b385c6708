"""How ranks are arranged: so many that see other samples, times so many that hold other stages of the model."""

from dataclasses import dataclass
from typing import Literal, get_args

from packhorse.errors import RanksError

Order = Literal["1f1b", "interleaved", "zero-bubble"]


@dataclass(frozen=True)
class Ranks:
    """`data` x `pipeline` ranks; rank r sees the samples of replica r // pipeline, and holds stage r % pipeline.

    `order` is that of a pipeline: one forward, one backward; interleaved, with `chunks` stages a rank that do not follow each
    other; or zero-bubble, with gradients of parameters found while a rank would else wait for those of values; None: the
    first or the last, as the plan finds. `ahead` more microbatches than it takes to keep all busy are under way in each
    stage, to hide the time of messages; None: as many as the plan finds worth their memory. `group`: a stage that does not fit
    in memory goes through it layer to layer, so many microbatches at a time; 0: it stays there; None: as the plan finds.
    """

    data: int = 1
    pipeline: int = 1
    order: Order | None = None
    chunks: int = 1
    ahead: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        for name in ("data", "pipeline", "chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RanksError(f"ranks.{name} is {value!r}, expected a number of at least 1")
        for name in ("ahead", "group"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise RanksError(f"ranks.{name} is {value!r}, expected a number of microbatches, or 0")
        if self.group and self.order not in (None, "1f1b"):
            raise RanksError(f"ranks.group is {self.group} in {self.order!r} order; stages are streamed in 1f1b only")
        if self.order is not None and self.order not in get_args(Order):
            raise RanksError(f"ranks.order is {self.order!r}, expected one of {', '.join(get_args(Order))}")
        if (self.order == "interleaved") != (self.chunks > 1):
            raise RanksError(
                f"ranks.order is {self.order!r} with {self.chunks} chunks; interleaved takes at least 2, the others take 1"
            )

    @property
    def size(self) -> int:
        return self.data * self.pipeline

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.chunks

    def place(self, rank: int) -> tuple[int, int]:
        """(replica, place in the pipeline)."""
        return divmod(rank, self.pipeline)

    def check_size(self, size: int) -> None:
        if self.size != size:
            raise RanksError(
                f"ranks are {self.data} x {self.pipeline} = {self.size}, but {size} processes were started; start that many, "
                "or leave ranks out"
            )

    def __str__(self) -> str:
        order = f" ({self.order})" if self.order else ""
        pipeline = f"{self.pipeline} stages in a pipeline{order}" if self.pipeline > 1 else ""
        data = f"{self.data} x the samples" if self.data > 1 else ""
        return " of ".join(part for part in (data, pipeline) if part) or "one rank"


ALONE = Ranks()


def parse_ranks(text: str) -> int | Ranks:
    """`8`, or replicas x stages: `4x2`."""
    parts = text.lower().split("x")
    if not 1 <= len(parts) <= 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise RanksError(f"ranks are {text!r}, expected a number, or replicas x stages, such as 4x2")
    return int(parts[0]) if len(parts) == 1 else Ranks(data=int(parts[0]), pipeline=int(parts[1]))
