"""Hosts that the optimizer plugs into, one file each, and the data wrappers that some need."""
