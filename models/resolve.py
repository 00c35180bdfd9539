"""What a user may give as a model: a folder, a GGUF file, a hub id ("org/name") or "demo"."""

from __future__ import annotations

from pathlib import Path

from deepinfer_jax.model_files import CheckpointError


def resolve_model_path(path: str | Path) -> Path:
    """The model folder that `path` names; "demo" and *.gguf are converted into a cached folder on
    first use, hub ids come from the Hugging Face cache or are downloaded into it.

    Raises CheckpointError when there is no such folder, file or model.
    """
    if str(path) == "demo":
        from deepinfer_jax.models.demo import demo_folder

        return demo_folder()
    given, path = str(path), Path(path)
    try:
        path = path.expanduser()
    except RuntimeError as error:  # no home directory
        raise CheckpointError(f"no such model: {given} ({error})") from error
    if path.suffix == ".gguf":
        from deepinfer_jax.models.gguf.cache import converted_folder

        return converted_folder(path)
    if path.is_dir():
        return path
    from deepinfer_jax.models.hub import HUB_ID, hub_folder

    if HUB_ID.fullmatch(given):
        return hub_folder(given)
    raise CheckpointError(
        f"no such model: {path} is neither a folder, a .gguf file, a hub id (org/name) nor 'demo'"
    )
