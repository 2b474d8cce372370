"""The Megatron train engine."""
