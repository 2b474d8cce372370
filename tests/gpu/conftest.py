"""What needs a CUDA device: `python -m pytest tests/gpu` on a machine that has one. Elsewhere these tests are not collected."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
