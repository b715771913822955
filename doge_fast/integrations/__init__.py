"""Hosts that the optimizer plugs into, one file each."""
