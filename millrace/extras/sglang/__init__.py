"""The SGLang rollout engine."""
