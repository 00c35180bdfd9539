"""One process per engine: a script for each role, the router, and what links the processes.

Imports: launch.cluster, disagg, rpc, snapshot, engine, kv, runner, models, scheduler,
scheduler.routing, config, environ, outputs, sampling_params, flags.
"""
