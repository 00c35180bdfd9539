"""The table of compiled programs, one per shape bucket. What they compute is in
step_functions.py, what the host packs for them in layouts.py.

Everything here is a function of shapes, so the same code serves an engine with arrays and a planner
without a device. Every program is `f(params, caches, state, packed inputs) -> (caches, state,
results)`; caches and state are donated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.models.base import CacheSpec
from deepinfer_jax.models.layers.expert_layers import OWN_EXPERTS, expert_groups
from deepinfer_jax.runner import kv_pools
from deepinfer_jax.runner.compile_watch import compile_watch
from deepinfer_jax.runner.decode_state import DecodeState
from deepinfer_jax.runner.expert_counts import ExpertCounts
from deepinfer_jax.runner.gpu_settings import compiler_options
from deepinfer_jax.runner.layouts import ProgramKey, layout_of
from deepinfer_jax.runner.mesh import rank_spec
from deepinfer_jax.runner.packing import PackedLayout
from deepinfer_jax.runner.step_functions import StepFunctions

logger = logging.getLogger(__name__)

ADMIT_BUCKETS = (1, 8, 64)


class CompileAfterWarmUp(RuntimeError):
    """A program was needed that warm-up did not compile."""


class StepPrograms:
    """Builds, compiles and keeps the programs of one engine. Local (per-rank) bodies are wrapped in
    one `jax.shard_map`."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: Any,
        graphdef: nnx.GraphDef,
        params: Any,
        param_specs: Any,
        cache_specs: tuple[CacheSpec, ...],
        mesh: Mesh,
    ) -> None:
        """params: the model's state, arrays or ShapeDtypeStructs; only its structure, shapes and
        shardings are used."""
        self.config, self.model_config, self.graphdef, self.mesh = (
            config,
            model_config,
            graphdef,
            mesh,
        )
        self.cache_specs = cache_specs
        self.axes = config.axes
        leaves, self._params_tree = jax.tree.flatten(params)
        self._param_specs = tuple(jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, P)))
        self.abstract_params = tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(leaves, self._param_specs, strict=True)
        )
        self.expert_groups = expert_groups(params)
        own = [group for group in self.expert_groups if group.name == OWN_EXPERTS]
        window = config.experts.window
        self.counted_shape: tuple[int, int, int] | None = (
            (window, len(own[0].layers), own[0].num_experts) if own and window else None
        )
        """(steps, layers, experts) of the counts in the decode state."""
        self.num_blocks = 0
        self.last_profiled: Any = None  # the compiled program of the memory profile
        self._compiled: dict[ProgramKey, Any] = {}
        self._registered: dict[ProgramKey, Callable[[], Any]] = {}
        self.compiles_after_warm_up = 0
        self.warm = False
        self._rank = rank_spec(self.axes)

    # ---- shapes ----------------------------------------------------------------------------------

    @property
    def has_state_caches(self) -> bool:
        return any(not isinstance(s, kv_pools.PagedCache) for s in self.cache_specs)

    @property
    def num_state_slots(self) -> int:
        """Rows of each StateCache."""
        return self.config.num_state_slots

    def layout(self, key: ProgramKey) -> PackedLayout:
        return layout_of(key, self.config)

    def abstract_caches(self, num_blocks: int) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
        c = self.config
        return kv_pools.abstract_caches(
            self.cache_specs, self.axes, self.mesh, num_blocks, c.block_size, self.num_state_slots
        )

    def init_state(self) -> DecodeState:
        """The local state of one rank, in a trace."""
        c = self.config
        return DecodeState.init(
            c.max_num_seqs,
            c.max_pages,
            self.model_config.vocab_size,
            c.args.enable_penalties,
            None if self.counted_shape is None else ExpertCounts.init(*self.counted_shape),
        )

    def abstract_state(self) -> DecodeState:
        """All ranks' state, as ShapeDtypeStructs with shardings."""
        local = jax.eval_shape(self.init_state)
        sharding = NamedSharding(self.mesh, self._rank)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self.axes.dp * x.shape[0], *x.shape[1:]), x.dtype, sharding=sharding
            ),
            local,
        )

    def allocate_state(self) -> DecodeState:
        f = jax.shard_map(
            self.init_state, mesh=self.mesh, in_specs=(), out_specs=self._rank, check_vma=False
        )
        return jax.jit(f)()

    # ---- compilation -----------------------------------------------------------------------------

    def function(self, key: ProgramKey) -> Callable:
        """The jitted global function of a program."""
        functions = StepFunctions(
            self.config, self.graphdef, self._params_tree, self.cache_specs, self.num_blocks
        )
        bodies = {
            "prefill": functions.prefill,
            "decode": functions.decode,
            "admit": functions.admit,
            "update": functions.update,
            "counts": functions.counts,
            "clone_blocks": functions.clone,
            "clone_states": functions.clone,
            "zero_states": functions.clone,
        }
        caches = kv_pools.cache_specs_tree(self.cache_specs, self.axes)
        body = partial(bodies[key.kind], key)
        mapped = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(self._param_specs, caches, self._rank, self._rank),
            out_specs=(caches, self._rank, self._rank),
            check_vma=False,
        )
        body_name = f"{key.kind}_{key.size}"
        mapped.__name__ = body_name
        options = compiler_options(self.mesh.devices.flat[0].platform)
        return jax.jit(mapped, donate_argnums=(1, 2), compiler_options=options or None)

    def lower(self, key: ProgramKey, num_blocks: int | None = None) -> Any:
        """Traces and lowers a program against abstract arguments; num_blocks overrides the pools'
        size (for profiling)."""
        if key in self._registered:
            return self._registered[key]()
        saved, self.num_blocks = (
            self.num_blocks,
            self.num_blocks if num_blocks is None else num_blocks,
        )
        try:
            row = jax.ShapeDtypeStruct(
                (self.axes.dp * self.layout(key).size,),
                jnp.int32,
                sharding=NamedSharding(self.mesh, self._rank),
            )
            args = (
                self.abstract_params,
                self.abstract_caches(self.num_blocks),
                self.abstract_state(),
                row,
            )
            return self.function(key).lower(*args)
        finally:
            self.num_blocks = saved

    def get(self, key: ProgramKey) -> Any:
        """The compiled program; compiles it now if warm-up has not (and then counts, warns or
        raises)."""
        program = self._compiled.get(key)
        if program is None:
            if self.warm:
                self.compiles_after_warm_up += 1
                if self.config.args.strict_compiles:
                    raise CompileAfterWarmUp(
                        f"program {key} was not compiled at warm-up; compiled: {self.names()}"
                    )
                logger.warning("compiling %s after warm-up: a step waits for the compiler", key)
                program = self._compiled[key] = self.lower(key).compile()
            else:
                with compile_watch().expected():
                    program = self._compiled[key] = self.lower(key).compile()
        return program

    def register(self, key: ProgramKey, lower: Callable[[], Any]) -> None:
        """Adds a program with a signature of its own: `lower` traces and lowers it. Warm-up
        compiles it with the others."""
        self._registered[key] = lower

    def missing(self, prefix: str = "") -> list[ProgramKey]:
        """Registered programs whose kind starts with `prefix` and that are not compiled yet."""
        keys = [k for k in self._registered if k.kind.startswith(prefix)]
        return [k for k in keys if k not in self._compiled]

    def put(self, key: ProgramKey, program: Any) -> None:
        self._compiled[key] = program

    def clear(self) -> None:
        self._compiled.clear()

    def names(self) -> list[str]:
        return [str(k) for k in self._compiled]

    def warm_up_keys(self) -> list[ProgramKey]:
        """Every program this role can need: its row of the bucket table."""
        c, policy = self.config, self.config.policy
        keys = [ProgramKey("prefill", t) for t in c.prefill_buckets] + list(self._registered)
        steps = sorted({1, c.args.num_decode_steps})
        keys += [ProgramKey("decode", b, k) for b in c.decode_buckets for k in steps]
        keys += [ProgramKey("admit", a) for a in ADMIT_BUCKETS]
        if policy.does_decode:
            keys.append(ProgramKey("update"))
        if c.args.enable_penalties:
            keys.append(ProgramKey("counts"))
        if policy.does_decode:
            keys.append(ProgramKey("clone_blocks"))
        if self.has_state_caches:
            keys += [ProgramKey("clone_states"), ProgramKey("zero_states")]
        return keys

    def largest_key(self) -> ProgramKey:
        """The role's largest step: what the memory profile is taken from."""
        c = self.config
        if c.policy.profiles_prefill_shape:
            return ProgramKey("prefill", c.prefill_buckets[-1])
        return ProgramKey("decode", c.decode_buckets[-1])
