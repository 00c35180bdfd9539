"""Special token ids of a GGUF file, and the tokens that end a generation.

llama.cpp decides the latter by id where a key says so, and by text besides (src/llama-vocab.cpp):
many files name only <|end_of_text|>, while the model ends its turns with <|eot_id|>.
"""

from __future__ import annotations

from deepinfer_jax.models.gguf.reader import GGUFFile

END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)
_FILL_IN_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""What follows a completed gap in a file: each ends a generation too."""
ALWAYS_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
"""Of gpt-oss: part of the text, whatever their type says."""
_SPM_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}


def special_id(file: GGUFFile, name: str) -> int | None:
    """tokenizer.ggml.<name>_token_id, or what a SentencePiece vocabulary has in its place; None
    without either. Raises CheckpointError for an id past the vocabulary."""
    key = f"tokenizer.ggml.{name}_token_id"
    if file.get(key) is None:
        is_spm = file.text("tokenizer.ggml.model") == "llama"
        return _SPM_DEFAULTS.get(name) if is_spm else None
    index, size = file.integer(key), len(file.strings("tokenizer.ggml.tokens"))
    if index >= size:
        raise file.fail(key, f"{index} is not one of {size} tokens")
    return index


def end_token_ids(file: GGUFFile) -> list[int]:
    """Every token that ends a generation: eos first, then the others that keys name, then those
    known by their text."""
    tokens = file.strings("tokenizer.ggml.tokens")
    by_text = {text: i for i, text in enumerate(tokens)}
    named = [special_id(file, name) for name in ("eos", "eot", "eom")]
    for name, texts in _FILL_IN_TEXTS.items():
        known = special_id(file, name)
        named.append(known if known is not None else _first(by_text, texts))
    found = [i for i in named if i is not None]
    found += sorted(by_text[text] for text in END_TEXTS & by_text.keys())
    return [i for i in dict.fromkeys(found) if tokens[i] not in _not_ends(by_text)]


def _first(by_text: dict[str, int], texts: tuple[str, ...]) -> int | None:
    return next((by_text[text] for text in texts if text in by_text), None)


def _not_ends(by_text: dict[str, int]) -> set[str]:
    """<|end|> ends a message, not a turn, where there are <|return|> and <|call|> (or <|calls|> and
    <|flush|>); </s> is a word where there is <|tool_response>."""
    call = "<|call|>" in by_text or "<|calls|>" in by_text
    ends = call and ("<|return|>" in by_text or "<|flush|>" in by_text)
    words = {"<|end|>"} if ends else set()
    return words | ({"</s>"} if "<|tool_response>" in by_text else set())
