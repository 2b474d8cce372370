"""What a run leaves for its readers."""
