"""Spreads requests over prompt and completion engines: NumPy only.

Imports: nothing of ours.
"""
