"""Sweeps: points of a grid, each in a process of its own, found again by the next command."""
