"""Discrete-event simulation on the real schedulers. NumPy only."""
