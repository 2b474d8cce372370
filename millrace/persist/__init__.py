"""The folder of a run: who owns it, its history, and one reader of everything in it."""
