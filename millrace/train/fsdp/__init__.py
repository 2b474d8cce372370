"""The FSDP2 train engine."""
