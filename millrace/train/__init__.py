"""What every train engine shares."""
