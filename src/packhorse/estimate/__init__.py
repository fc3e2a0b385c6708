"""What a list of actions will take, without running it."""

from packhorse.estimate.estimate import (
    MOST_MICROBATCHES,
    Estimate,
    estimate,
    estimate_plain,
    estimate_standing,
    estimate_together,
)
from packhorse.estimate.walk import KEPT, Choices

__all__ = [
    "KEPT",
    "MOST_MICROBATCHES",
    "Choices",
    "Estimate",
    "estimate",
    "estimate_plain",
    "estimate_standing",
    "estimate_together",
]
