"""What binds a run, and the number that lifts it."""
