"""LLMEngine and its parts: requests in, steps, outputs out. Imports kv, runner, text."""
