"""Attention layers in which a row attends to chosen or compressed entries.

Imports: models, models.layers, kernels_pallas.
"""
