"""All live requests with their KV, written while serving goes on, restored into any engine.

Imports: engine, experts, kv, scheduler, outputs, sampling_params.
"""
