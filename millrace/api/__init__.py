"""The Python API: `millrace.train` and `millrace.Rollouts`, with plain functions and lists.

It turns what the user gives into keys, and then does what the commands do.
"""

from millrace.api.result import Run
from millrace.api.rollouts import Rollouts
from millrace.api.training import train
from millrace.run.callbacks import CallbackError, DrawnResponse, LiveVersion

__all__ = ["CallbackError", "DrawnResponse", "LiveVersion", "Rollouts", "Run", "train"]
