"""Prefill and decode apart: the hand-over and what holds both sides together. Imports snapshot,
engine, kv, rpc."""
