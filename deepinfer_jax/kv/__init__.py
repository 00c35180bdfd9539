"""KV blocks on the move and at rest: between meshes, to host memory and disk.

Imports: runner, models, kernels_pallas.
"""
