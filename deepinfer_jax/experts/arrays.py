"""The experts of one model on the device: read what was counted, move experts between slots."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from deepinfer_jax.experts.move import move_layout, move_program, pack_move, plan_moves
from deepinfer_jax.models.layers.expert_layers import ExpertGroup, ExpertLayer
from deepinfer_jax.models.layers.placement import initial_physical_to_logical
from deepinfer_jax.runner.expert_counts import ExpertCounts
from deepinfer_jax.runner.layouts import ProgramKey
from deepinfer_jax.runner.model_runner import ModelRunner

READ = ProgramKey("read_experts")


class ExpertArrays:
    """One group's weights and tables among a runner's parameters.

    slots [layers, physical]: the expert that each physical slot of each layer holds now.
    """

    def __init__(self, runner: ModelRunner, group: ExpertGroup) -> None:
        self._runner, self.group = runner, group
        initial = initial_physical_to_logical(group.num_experts, group.num_physical)
        self.slots: Int[np.ndarray, "layers physical"] = np.tile(initial, (len(group.layers), 1))
        self._replicated = NamedSharding(runner.mesh, P())
        self._kinds: dict[tuple[object, ...], ProgramKey] = {}

    @property
    def ranks(self) -> int:
        return self._runner.config.axes.ep

    def register(self, *, moves: bool) -> None:
        """Before warm-up: the programs that read the counts, and with `moves` those that move
        experts, one per kind of layer."""
        self._runner.programs.register(READ, self._lower_read)
        for layer in self.group.layers if moves else ():
            kind = self._kind(layer)
            if kind not in self._kinds:
                key = ProgramKey("move_experts", len(self._kinds))
                self._kinds[kind] = key
                self._runner.programs.register(key, lambda layer=layer: self._lower_move(layer))

    def read_counts(self) -> jax.Array:
        """i32 [steps, layers, experts] tokens, summed over the ranks: on its way to the host."""
        counts = self._runner.programs.get(READ)(self._runner.state.experts)
        counts.copy_to_host_async()
        return counts

    def move(self, layer: int, slots: Int[np.ndarray, " physical"]) -> int:
        """Enqueues a rearrangement of one layer; steps dispatched from now on see all of it.
        Returns how many slots get another expert. ValueError when an expert would be lost."""
        plan = plan_moves(self.slots[layer], slots, self.ranks)
        if not plan.moved:
            return 0
        packed = self._put(pack_move(plan, slots, self.group.num_experts))
        home, params = self.group.layers[layer], self._runner.params
        program = self._runner.programs.get(self._kinds[self._kind(home)])
        weights, tables = program(tuple(params[i] for i in home.weights), packed)
        places = (*home.weights, *home.tables)
        self._runner.replace_params(dict(zip(places, (*weights, *tables), strict=True)))
        self.slots[layer] = slots
        return plan.moved

    def _put(self, row: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(row.shape, self._replicated, lambda part: row[part])

    def _shapes(self, layer: ExpertLayer) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self._runner.programs.abstract_params[i] for i in layer.weights)

    def _kind(self, layer: ExpertLayer) -> tuple[object, ...]:
        return tuple((x.shape, x.dtype, x.sharding) for x in self._shapes(layer))

    def _lower_move(self, layer: ExpertLayer) -> jax.stages.Lowered:
        shapes, experts = self._shapes(layer), self.group.num_experts
        size = move_layout(experts, self.group.num_physical).size
        packed = jax.ShapeDtypeStruct((size,), np.int32, sharding=self._replicated)
        specs = [x.sharding.spec for x in shapes]
        program = move_program(shapes, specs, experts, self._runner.mesh, self._runner.config.axes)
        return program.lower(shapes, packed)

    def _lower_read(self) -> jax.stages.Lowered:
        programs, axes = self._runner.programs, self._runner.config.axes

        def read_experts(counts: ExpertCounts) -> jax.Array:
            return jax.lax.psum(counts.ring, axes.dp_axes)

        specs = P(axes.dp_axes)
        mapped = jax.shard_map(
            read_experts,
            mesh=self._runner.mesh,
            in_specs=(specs,),
            out_specs=P(),
            check_vma=False,
        )
        return jax.jit(mapped).lower(programs.abstract_state().experts)
