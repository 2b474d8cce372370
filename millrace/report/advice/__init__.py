"""Advice: the bottleneck of a run, and the key that lifts it."""
