"""Text and token ids: tokenizer, chat template, detokenizer.

Imports: model_files, outputs, sampling_params.
"""
