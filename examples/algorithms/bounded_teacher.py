"""A teacher's signal in a bounded form: no token can pull harder than 1.

    millrace train RECIPE teachers.NAME.path=FOLDER \
        distillation.loss_mode=bounded_teacher.py:bounded
"""

from torch import Tensor


def bounded(log_probs: Tensor, teacher: Tensor) -> Tensor:
    """Return the advantages of drawn tokens from log-probs of the policy and a teacher, each [M]."""
    return (teacher - log_probs).tanh()
