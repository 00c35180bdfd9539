"""Messages between processes and the client of a router.

Imports: engine, text, models, scheduler.routing, outputs, sampling_params.
"""
