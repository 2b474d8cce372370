"""A run as it goes: in the terminal, and on a local page."""
