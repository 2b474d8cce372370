"""What happened when, for Perfetto, and its reader."""
