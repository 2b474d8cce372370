"""Faults on real processes: kill, stop, partition, fill and corrupt a run that trains."""
