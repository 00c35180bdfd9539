"""Discrete-event simulation on the real schedulers: NumPy only.

Imports: scheduler, scheduler.routing.
"""
