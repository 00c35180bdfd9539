"""GGUF files: read with every length checked, and converted into Hugging Face style folders.

Imports: kernels_pallas, model_files, models.layers.
"""

from deepinfer_jax.models.gguf.convert import convert_gguf
from deepinfer_jax.models.gguf.reader import GGUFFile

__all__ = ["GGUFFile", "convert_gguf"]
