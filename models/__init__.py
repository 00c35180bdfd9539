"""Model definitions and how checkpoints become parameters.

Imports: models.layers, kernels_pallas, model_files.
"""
