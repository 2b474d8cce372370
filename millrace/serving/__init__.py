"""Rollout engines whose model runs in processes of its own, and their end of a weight sync."""
