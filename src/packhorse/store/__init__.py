"""The store: the model's parameters and optimizer states, in RAM or on disk."""

from packhorse.store.blocks import GRADIENT, MASTER, WORKING, Block, Slot, make_block
from packhorse.store.disk import DiskStore
from packhorse.store.journal import Journal
from packhorse.store.ram import RamStore
from packhorse.store.stash import Stash
from packhorse.store.store import Loan, Store

__all__ = [
    "GRADIENT",
    "MASTER",
    "WORKING",
    "Block",
    "DiskStore",
    "Journal",
    "Loan",
    "RamStore",
    "Slot",
    "Stash",
    "Store",
    "make_block",
]
