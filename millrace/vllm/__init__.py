"""The vLLM rollout engine, and its end of a weight sync."""
