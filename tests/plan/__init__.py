"""Costs, plans and their commands."""
