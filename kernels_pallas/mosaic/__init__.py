"""Pallas Mosaic kernels for NVIDIA GPUs, loaded only where the dispatch table picks them.

Imports: kernels_pallas.
"""
