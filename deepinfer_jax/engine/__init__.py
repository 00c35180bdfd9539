"""LLMEngine and its parts: requests in, steps, outputs out.

Imports: engine.stats, experts, kv, runner, text, models, kernels_pallas, scheduler, config,
outputs, sampling_params.
"""
