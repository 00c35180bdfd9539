"""C++ for CPUs and its Python side, compiled for the machine at first use.

Imports: kernels_pallas.
"""
