"""The vLLM rollout engine."""
