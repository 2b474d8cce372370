"""The versions of a run that represent a long run."""

from __future__ import annotations

import math

from millrace.schedule.schedule import Schedule


def counted(samples: int, skip: int, schedule: Schedule) -> range:
    """Return the versions of a run of `samples` samples that represent a long run.

    These versions are left out:

    - those of the first `skip` optimizer steps
    - the first ones, whose samples were drawn while the trainer was idle
    - the last ones, during which less than a window of samples was admitted
    """
    ahead = math.ceil(schedule.capacity / schedule.window) - 1
    steps = schedule.trigger_parameter_sync_step * schedule.require_batches
    end = (samples - schedule.capacity) // schedule.window + 1
    return range(max(math.ceil(skip / steps), ahead + 1 if ahead else 0), end)
