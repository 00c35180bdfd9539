"""From a model folder to parameters on devices.

`load_model` builds the module abstractly (no memory), checks the checkpoint against the model's
rules (models/rules.py says how a model declares them), then fills one parameter after the other:
rows are read through a memory map, cast or quantised in pieces of a few MiB, and handed to the
device; on a CPU the device takes the host buffer over without a copy. So the host's peak is the
weights plus one piece there, and one parameter elsewhere. With a mesh, a process reads only the
slices its own devices hold.

Parameters are a plain nested dict of arrays (`nnx.merge(graphdef, params)` inside the trace takes
it as it is).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.model_files import CheckpointError
from deepinfer_jax.models import registry
from deepinfer_jax.models.base import ParallelAxes
from deepinfer_jax.models.checkpoint import Checkpoint
from deepinfer_jax.models.checkpoint_names import add_prefix, rename, settle_tie
from deepinfer_jax.models.hf_config import (
    checkpoint_quantization,
    read_folder_config,
    read_generation_config,
)
from deepinfer_jax.models.layers.param import partition_spec
from deepinfer_jax.models.layers.quant import quant_format
from deepinfer_jax.models.materialize import Index, Materializer, Slot, random_experts, random_slice
from deepinfer_jax.models.resolve import resolve_model_path
from deepinfer_jax.models.rules import Rule, WeightRules

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
Tree = dict[str, Any]


@dataclass(frozen=True)
class LoadedModel:
    """graphdef and params make the module (`nnx.merge`); param_specs is params' tree of
    PartitionSpec."""

    graphdef: nnx.GraphDef
    params: Tree
    config: Any
    model_class: type
    param_specs: Tree


def load_hf_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model folder, a GGUF file or "demo" (the last two are converted to a folder
    first)."""
    return read_folder_config(resolve_model_path(path))


def load_generation_config(path: str | Path) -> dict[str, Any]:
    """generation_config.json of the same; {} when there is none."""
    return read_generation_config(resolve_model_path(path))


def abstract_model(
    config: Any,
    model_class: type,
    axes: ParallelAxes,
    dtype: jnp.dtype | str,
    quant: str | None = None,
) -> tuple[nnx.GraphDef, Tree, Tree]:
    """(graphdef, params as ShapeDtypeStruct of global shapes, their PartitionSpecs): for planning
    and AOT compilation."""
    graphdef, state = _abstract_state(config, model_class, axes, dtype, quant)
    return (
        graphdef,
        nnx.to_pure_dict(state),
        _nested({p: partition_spec(v, axes) for p, v in _variables(state)}),
    )


def load_model(
    path: str | Path,
    *,
    dtype: jnp.dtype | str,
    quant: str | None = None,
    mesh: Mesh | None = None,
    axes: ParallelAxes = ParallelAxes(),  # noqa: B008 (frozen)
    load_format: str = "auto",
    config_overrides: dict[str, Any] | None = None,
) -> LoadedModel:
    """Loads the folder, GGUF file or "demo" at `path`.

    dtype: float32, bfloat16 or float16; checkpoint floats are cast. quant: None, "int8", "int4" or
    "fp8" for the linear layers. mesh: devices to lay parameters over by `axes`; None: the default
    device. load_format "dummy": random weights, only config.json is read. config_overrides: fields
    of the model's config that are ours to choose, such as `moe` (MoeOptions). Raises ValueError for
    an unknown model, option or dtype, and CheckpointError for a malformed file, or listing all
    missing, unexpected and wrongly shaped tensors.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {load_format!r} is not one of {LOAD_FORMATS}")
    folder = resolve_model_path(path)
    read_model_config(folder)  # what is wrong with it is said before weights are looked for
    if load_format == "dummy":
        return _load_model(folder, None, dtype, quant, mesh, axes, config_overrides or {})
    with Checkpoint(folder) as checkpoint:
        add_prefix(checkpoint)
        return _load_model(folder, checkpoint, dtype, quant, mesh, axes, config_overrides or {})


def read_model_config(folder: Path) -> tuple[type, Any]:
    """(model class, its configuration) from a folder's config.json.

    Raises CheckpointError naming the file and what in it is unsupported, missing or malformed.
    """
    return _model_config(folder, read_folder_config(folder))


def _model_config(folder: Path, hf: dict[str, Any]) -> tuple[type, Any]:
    try:
        checkpoint_quantization(hf)
        model_class = registry.resolve(hf)
        return model_class, model_class.config_from_hf(hf)
    except _MALFORMED as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What reading a malformed configuration may raise."""


def _load_model(
    folder: Path,
    checkpoint: Checkpoint | None,
    dtype: jnp.dtype | str,
    quant: str | None,
    mesh: Mesh | None,
    axes: ParallelAxes,
    overrides: dict[str, Any],
) -> LoadedModel:
    """checkpoint None: random weights."""
    hf = read_folder_config(folder)
    if checkpoint is not None:
        tied = bool(hf.get("tie_word_embeddings", False))
        hf = {**hf, "tie_word_embeddings": settle_tie(checkpoint, tied)}
    model_class, config = _model_config(folder, hf)
    config = dataclasses.replace(config, **overrides)
    graphdef, state = _abstract_state(config, model_class, axes, dtype, quant)
    variables = dict(_variables(state))
    place = _Placer(mesh, {p: partition_spec(v, axes) for p, v in variables.items()})
    slots = {".".join(map(str, p)): Slot.of(".".join(map(str, p)), v) for p, v in variables.items()}
    paths = {".".join(map(str, p)): p for p in variables}
    if checkpoint is None:
        rules = model_class.weight_rules(config, axes).rules
        stacked = {rule.target: rule.experts for rule in rules if rule.experts is not None}

        def fill(name: str, index: Index) -> np.ndarray:
            slot, experts = slots[name], stacked.get(name)
            return (
                random_slice(slot, index)
                if experts is None
                else random_experts(slot, index, experts)
            )

        arrays = {
            paths[n]: place([(paths[n], s.shape)], lambda indices, n=n: [fill(n, indices[0])])[0]
            for n, s in slots.items()
        }
    else:
        rules = model_class.weight_rules(config, axes)
        rename(checkpoint, rules.canonical)
        arrays = _load(
            checkpoint,
            model_class,
            rules,
            slots,
            paths,
            place,
            axes.tp,
        )
    return LoadedModel(graphdef, _nested(arrays), config, model_class, _nested(place.specs))


def _abstract_state(
    config: Any, model_class: type, axes: ParallelAxes, dtype: jnp.dtype | str, quant: str | None
) -> tuple[nnx.GraphDef, nnx.State]:
    if (name := jnp.dtype(dtype).name) not in DTYPES:
        raise ValueError(f"dtype {name} is not supported; supported: {DTYPES}")
    if quant is not None:
        quant_format(quant)
    module = nnx.eval_shape(
        lambda: model_class(config, axes=axes, dtype=jnp.dtype(dtype), quant=quant)
    )
    return nnx.split(module)


def _variables(state: nnx.State) -> list[tuple[tuple, nnx.Variable]]:
    return list(nnx.to_flat_state(state))


def _nested(flat: dict[tuple, Any]) -> Tree:
    tree: Tree = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def _load(
    checkpoint: Checkpoint,
    model_class: type,
    weight_rules: WeightRules,
    slots: dict[str, Slot],
    paths: dict[str, tuple],
    place: _Placer,
    tp: int,
) -> dict[tuple, jax.Array]:
    rules = {rule.target: rule for rule in weight_rules.rules}
    companions = {path for slot in slots.values() for path in slot.companion_paths}
    _check_targets(model_class, rules, slots.keys() - companions)
    jobs = [
        Materializer(checkpoint, r, [slots[p] for p in (t, *slots[t].companion_paths)], tp)
        for t, r in rules.items()
    ]
    if problems := [p for job in jobs for p in job.source_problems()] + _unexpected(
        checkpoint, weight_rules
    ):
        raise CheckpointError(
            f"{checkpoint.folder} does not fit {model_class.__name__}:\n  "
            + "\n  ".join(dict.fromkeys(problems))
        )
    if left := [name for name in checkpoint.tensors if weight_rules.is_ignored(name)]:
        logger.info(
            "%s: %d tensors are not loaded, such as %s", checkpoint.folder, len(left), left[0]
        )
    arrays: dict[tuple, jax.Array] = {}
    for job in jobs:
        targets = [(paths[slot.path], slot.shape) for slot in job.slots]
        arrays |= zip((path for path, _ in targets), place(targets, job.build), strict=True)
        for name in job.rule.names():
            checkpoint.release(name)
    return arrays


def _check_targets(model_class: type, rules: dict[str, Rule], wanted: set[str]) -> None:
    """A model whose rules and parameters disagree is a programming error; it is named before
    anything is read."""
    if rules.keys() != wanted:
        without, unknown = sorted(wanted - rules.keys()), sorted(rules.keys() - wanted)
        raise RuntimeError(
            f"{model_class.__name__}: parameters without a rule {without}, rules without a"
            f" parameter {unknown}"
        )


def _unexpected(checkpoint: Checkpoint, weight_rules: WeightRules) -> list[str]:
    known = {name for rule in weight_rules.rules for name in rule.names()}
    known |= {f"{name}_scale_inv" for name in known}
    return [
        f"unexpected {name}"
        for name in sorted(checkpoint.tensors.keys() - known)
        if not weight_rules.is_ignored(name)
    ]


class _Placer:
    """Puts host slices on devices: whole on the default device without a mesh, else by each
    parameter's PartitionSpec."""

    def __init__(self, mesh: Mesh | None, specs: dict[tuple, PartitionSpec]) -> None:
        self.mesh, self.specs = mesh, specs

    def __call__(
        self,
        targets: list[tuple[tuple, tuple[int, ...]]],
        build: Callable[[list[Index]], list[np.ndarray]],
    ) -> tuple[jax.Array, ...]:
        """targets: (path, global shape) of parameters built together by `build(one
        slice of each)`."""
        if self.mesh is None:
            parts = build([_whole(shape) for _, shape in targets])
            return tuple(jax.block_until_ready([jax.device_put(part) for part in parts]))
        shardings = [NamedSharding(self.mesh, self.specs[path]) for path, _ in targets]
        maps = [
            s.addressable_devices_indices_map(shape)
            for s, (_, shape) in zip(shardings, targets, strict=True)
        ]
        built: dict[tuple, tuple[np.ndarray, ...]] = {}
        placed: list[list[jax.Array]] = [[] for _ in targets]
        for device in maps[0]:
            indices = [
                _bounded(m[device], shape) for m, (_, shape) in zip(maps, targets, strict=True)
            ]
            key = tuple((s.start, s.stop) for index in indices for s in index)
            if key not in built:
                built[key] = build(indices)
            for arrays, part in zip(placed, built[key], strict=True):
                arrays.append(jax.device_put(part, device))
        jax.block_until_ready(placed)
        return tuple(
            jax.make_array_from_single_device_arrays(shape, sharding, arrays)
            for (_, shape), sharding, arrays in zip(targets, shardings, placed, strict=True)
        )


def _whole(shape: tuple[int, ...]) -> Index:
    return tuple(slice(0, n) for n in shape)


def _bounded(index: Index, shape: tuple[int, ...]) -> Index:
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
