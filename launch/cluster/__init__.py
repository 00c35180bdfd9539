"""The router process: engines and clients connected to it, what they may say, how it is seen.

Imports: disagg, rpc, engine.stats, scheduler.routing, outputs, sampling_params,
json_text.
"""
