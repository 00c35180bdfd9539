"""What models are made of: attention, rotary embedding, linear layers, experts.

Imports: models, kernels_pallas.
"""
