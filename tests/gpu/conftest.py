"""Tests that need a CUDA device.

Run `python -m pytest tests/gpu` on a machine with one. On other machines pytest does not collect
these tests.
"""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
