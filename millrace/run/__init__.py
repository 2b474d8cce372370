"""From a Config to a finished run."""
