"""Spreads requests over prompt and completion engines: NumPy only.

Imports: scheduler.
"""
