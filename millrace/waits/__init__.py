"""Who waits for whom, since when, and who holds everybody up. It needs no other room."""
