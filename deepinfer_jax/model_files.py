"""The files of a model: one type of error for all that is wrong with them, and JSON with limits.

Imports: nothing of ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 512 << 20


class CheckpointError(ValueError):
    """A model's file is damaged, malformed or asks for what is not supported.

    Every loader raises it (folders, safetensors, GGUF, tokenizers, configurations); the message
    names the file and, where there is one, the key or tensor. What a caller gives as an argument is
    a plain ValueError.
    """


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError naming the file when there is none."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read")
        text = path.read_bytes().decode("utf-8-sig")
        value = json.loads(text)
        if "\\ud" in text.lower():  # half a surrogate pair is no text: encoding it says where
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """`read_json`; {} where there is no such file."""
    return read_json(path) if path.is_file() else {}
