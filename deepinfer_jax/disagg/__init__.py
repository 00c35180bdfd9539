"""Prefill and decode apart: the hand-over and what holds both sides together.

Imports: snapshot, engine, kv, runner, models, scheduler, scheduler.routing, config, outputs,
sampling_params.
"""
