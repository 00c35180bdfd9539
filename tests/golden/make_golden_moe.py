"""Write the small mixture-of-experts fixtures: each is there for terms that the larger ones of
make_golden.py do not use.

Usage: python make_golden_moe.py OUT_DIR [NAME...]      needs what make_golden.py needs; same files,
two prompts each
"""

import sys

from make_golden import MLA, make

SMALL = dict(
    vocab_size=192,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=2,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    rms_norm_eps=1e-6,
    moe_intermediate_size=16,
    intermediate_size=64,
    num_experts_per_tok=3,
)
SMALL_MLA = dict(
    MLA,
    q_lora_rank=24,
    num_key_value_heads=2,
    num_hidden_layers=2,
    n_routed_experts=12,
    n_shared_experts=2,
)
CASES = {
    "deepseek_v2_groups": (
        "deepseek_v2",
        SMALL
        | SMALL_MLA
        | dict(
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            first_k_dense_replace=1,
            routed_scaling_factor=4.0,
            norm_topk_prob=True,
        ),
    ),
    "deepseek_v3_halves": (
        "deepseek_v3",
        SMALL
        | SMALL_MLA
        | dict(
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            rope_interleave=False,
            routed_scaling_factor=1.5,
            norm_topk_prob=False,
            attention_bias=True,
        ),
    ),
    "qwen3_moe_sparse": (
        "qwen3_moe",
        SMALL
        | dict(
            num_hidden_layers=4,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=10,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
        ),
    ),
}

if __name__ == "__main__":
    for case in sys.argv[2:] or CASES:
        make(sys.argv[1], case, *CASES[case], lengths=(5, 45), new=12)
