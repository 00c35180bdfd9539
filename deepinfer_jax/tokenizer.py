"""Tokenizers as users import them: a model folder's text to token ids and back, without an engine.

Imports: text.
"""

from __future__ import annotations

from deepinfer_jax.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
