"""Training apart: parts of a model on synthetic labels where it is cut."""

from packhorse.sil.labels import Hadamard, Labels, Readout, Scheme, Site, Uniform
from packhorse.sil.standing import Progress, Standing
from packhorse.sil.trainer import SegmentedTrainer

__all__ = ["Hadamard", "Labels", "Progress", "Readout", "Scheme", "SegmentedTrainer", "Site", "Standing", "Uniform"]
