"""The capacity planner: memory, blocks, step floors and P:D splits before a GPU is at hand.

Imports: experts, runner, models, models.layers, kernels_pallas.aot, scheduler,
scheduler.simulation, config, json_text.
"""
