"""What a model computes: captured once, then a value that partition, schedule and plan read."""

from packhorse.graph.capture import capture
from packhorse.graph.graph import (
    Buffer,
    Graph,
    Guard,
    Node,
    Operation,
    Parameter,
    Ref,
    Size,
    Type,
    Value,
)

__all__ = ["Buffer", "Graph", "Guard", "Node", "Operation", "Parameter", "Ref", "Size", "Type", "Value", "capture"]
