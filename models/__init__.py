"""Model definitions and how checkpoints become parameters.

Imports: models.layers, models.layers.sparse, models.gguf, kernels_pallas, model_files.
"""
