"""Plans: costs of finished runs, and the real loops simulated over them."""
