"""The torch rollout engine."""
