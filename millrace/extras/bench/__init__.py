"""The measurements of modes, agents, training and the weight sync."""
