"""DeepInfer-JAX: LLM inference in JAX with prefill and decode apart."""
