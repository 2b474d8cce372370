"""The trace of a run for Perfetto, and its reader."""
