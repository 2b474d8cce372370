"""Accounts of every token, every second of a device and every wait."""
