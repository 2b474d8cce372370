"""Tools that run what a model wrote: a sandbox, and a Python tool in it."""
