"""Text and token ids: tokenizer, chat template, detokenizer.

Imports: json_text, model_files, sampling_params.
"""
