"""Sparse attention: choosing entries by an indexer's scores, and attending to chosen entries
only.

Imports: kernels_pallas.
"""
