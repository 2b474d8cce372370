"""A faulty world on the virtual clock: the real run over workers, links and a disk that fail."""
