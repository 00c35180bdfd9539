"""Messages between processes and the client of a router.

Imports: engine, text, models, outputs, sampling_params.
"""
