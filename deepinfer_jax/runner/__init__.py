"""Device side: step programs, decode state, pools, memory, mesh.

Imports: models, models.layers, kernels_pallas, scheduler, config, environ.
"""
