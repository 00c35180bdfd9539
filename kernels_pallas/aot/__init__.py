"""Kernels compiled for GPUs that are not there: targets, cases, checks (`python -m` runs them).

Imports: kernels_pallas.
"""
