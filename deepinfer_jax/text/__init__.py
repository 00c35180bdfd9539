"""Text and token ids: tokenizer, chat template, detokenizer. Imports nothing of ours but
sampling_params and outputs."""
