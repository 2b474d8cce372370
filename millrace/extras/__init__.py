"""Optional rooms. The core reaches each by its names in `config/plugins.py`, and works without it."""
