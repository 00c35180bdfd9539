"""Text and token ids: tokenizer, chat template, detokenizer.

Imports: outputs, sampling_params.
"""
