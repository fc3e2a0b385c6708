"""Errors a user meets. Each message says what was found, what was expected and what to do."""


class PackhorseError(Exception):
    """Base of every error packhorse raises on purpose."""


class CaptureError(PackhorseError):
    """The model could not be turned into a graph."""


class BatchError(PackhorseError):
    """A batch does not have the structure, sizes or dtypes of the example."""


class PartitionError(PackhorseError):
    """The graph cannot be cut as asked."""


class ModelError(PackhorseError):
    """A MODEL named on the command line could not be found or built."""


class ScheduleError(PackhorseError):
    """A list of actions cannot run in its order."""


class StoreError(PackhorseError):
    """The store cannot be made, opened, read or written."""


class OptimizerError(PackhorseError):
    """The optimizer does not fit the model, or cannot be run piece by piece."""


class BudgetError(PackhorseError):
    """The run does not fit the memory it is given."""


class PlanError(PackhorseError):
    """A plan's file cannot be read, or is of another model."""


class MachineError(PackhorseError):
    """A machine is described wrongly, or cannot be measured."""


class NumericsError(PackhorseError):
    """A loss or a gradient is not finite."""


class GradientError(NumericsError):
    """The gradient of one parameter is not finite; of several ranks, those that do not have it do not know."""


class RanksError(PackhorseError):
    """Processes that should train one model together do not fit, or one of them is gone."""
