"""What a user may give as a model: a folder, a GGUF file, or "demo"."""

from __future__ import annotations

from pathlib import Path


def resolve_model_path(path: str | Path) -> Path:
    """The model folder that `path` names; "demo" and *.gguf are converted into a cached folder on
    first use.

    Raises ValueError when there is no such folder or file.
    """
    if str(path) == "demo":
        from deepinfer_jax.models.demo import demo_folder

        return demo_folder()
    path = Path(path).expanduser()
    if path.suffix == ".gguf":
        from deepinfer_jax.models.gguf.cache import converted_folder

        return converted_folder(path)
    if not path.is_dir():
        raise ValueError(f"no such model: {path} is neither a folder, a .gguf file nor 'demo'")
    return path
