"""Array ops that depend on the device: paged attention, KV writes, grouped matmuls; each with an
XLA path and GPU kernels.

Ops pick their implementation from the table in `dispatch` at trace time; `explain()` tells what was
picked and why.

Imports: kernels_pallas.cpu, kernels_pallas.mosaic, kernels_pallas.sparse.
"""

from __future__ import annotations

from .decoder_layers import decoder_layers
from .dispatch import current_target, explain, use_target
from .grouped_matmul import grouped_matmul, moe_experts
from .kv_write import kv_write
from .matmul import matmul
from .paged_decode import paged_decode
from .ragged_prefill import ragged_prefill
from .sparse.index_topk import index_topk
from .sparse.sparse_attention import KeySource, sparse_attention

__all__ = [
    "KeySource",
    "current_target",
    "decoder_layers",
    "explain",
    "grouped_matmul",
    "index_topk",
    "kv_write",
    "matmul",
    "moe_experts",
    "paged_decode",
    "ragged_prefill",
    "sparse_attention",
    "use_target",
]
