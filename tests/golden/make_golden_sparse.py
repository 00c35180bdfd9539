"""Write the small sparse-attention fixtures: each is there for terms that the larger ones of
make_golden.py do not use.

Usage: python make_golden_sparse.py OUT_DIR [NAME...]      needs what make_golden.py needs; same
files, two prompts each
"""

import sys

from make_golden import make
from make_golden_moe import SMALL, SMALL_MLA

# 32 index heads: with few of them many scores are exactly 0, and ties make the reference ambiguous
INDEX = dict(index_n_heads=32, index_head_dim=20, index_topk=5)
YARN = dict(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=0.7,
    rope_theta=10000.0,
)
V4 = dict(
    SMALL,
    num_key_value_heads=1,
    head_dim=24,
    qk_rope_head_dim=8,
    q_lora_rank=16,
    n_routed_experts=6,
    n_shared_experts=1,
    o_groups=2,
    o_lora_rank=12,
    hc_mult=2,
    hc_sinkhorn_iters=5,
    num_nextn_predict_layers=0,
)
SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
CASES = {
    "deepseek_v32_yarn": (
        "deepseek_v32",
        SMALL
        | SMALL_MLA
        | INDEX
        | dict(
            n_group=3,
            topk_group=2,
            mlp_layer_types=["sparse", "dense"],
            attention_bias=True,
            routed_scaling_factor=1.5,
            norm_topk_prob=False,
            rope_parameters=YARN,
        ),
    ),
    # entries of 3 and 24 tokens, YaRN in compressed layers, no table of tokens in layer 0
    "deepseek_v4_yarn": (
        "deepseek_v4",
        V4
        | INDEX
        | dict(
            sliding_window=5,
            layer_types=[SPARSE, HEAVY, SLIDING],
            mlp_layer_types=["moe", "hash_moe", "moe"],
            compress_rates={SPARSE: 3, HEAVY: 24},
            swiglu_limit=0.6,
            routed_scaling_factor=2.5,
            rope_parameters={k: v for k, v in YARN.items() if not k.startswith("mscale")},
        ),
    ),
}

if __name__ == "__main__":
    for case in sys.argv[2:] or CASES:
        make(sys.argv[1], case, *CASES[case], lengths=(5, 45), new=12)
