"""The parts that all train engines share."""
