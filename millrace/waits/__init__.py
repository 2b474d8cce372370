"""The graph of waits: who waits for whom, since when, and the culprit. It needs no other room."""
