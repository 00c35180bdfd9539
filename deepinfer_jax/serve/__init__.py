"""An OpenAI-compatible HTTP server over one engine, a disaggregated one, or a router's deployment.

Imports: deepinfer_jax, rpc, engine, engine.stats, text, outputs, sampling_params.
"""
