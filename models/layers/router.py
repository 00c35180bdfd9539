"""Expert routers: which experts a token goes to, and with what weight.

One function covers the families served here; the configuration says which terms apply:

* Qwen3-MoE: softmax over all experts, top-k, weights optionally normalised to sum 1.
* DeepSeek-V2 (arXiv 2405.04434, section 2.2.2): softmax, top-k over all experts or only over the
  `topk_groups` groups whose best expert scores highest; weights are never normalised and are
  multiplied by the scaling factor.
* DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): sigmoid affinities; a correction bias is added for
  *choosing* only; a group's score is the sum of its two best biased affinities; weights are the
  unbiased affinities, optionally normalised, times the scaling factor.
* DeepSeek-V4: as V3 without groups, affinities are sqrt(softplus(logit)); the first layers take a
  token's experts from a table and only their weights from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

SCORING = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True)
class RouterConfig:
    """scoring: one of SCORING; group_score: how a group is ranked, "max" or "top2" (sum of
    its two best)."""

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    normalize: bool = False
    normalize_eps: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in SCORING:
            raise ValueError(f"router scoring must be one of {SCORING}, got {self.scoring!r}")
        if self.group_score not in ("max", "top2"):
            raise ValueError(
                f"router group_score must be 'max' or 'top2', got {self.group_score!r}"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"router top_k must be in 1..{self.num_experts}, got {self.top_k}")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts do not divide into {self.num_groups} groups"
            )
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"router topk_groups must be in 1..{self.num_groups}, got {self.topk_groups}"
            )
        reachable = self.topk_groups * (self.num_experts // self.num_groups)
        if self.top_k > reachable:
            raise ValueError(
                f"router top_k {self.top_k} exceeds the {reachable} experts of {self.topk_groups}"
                f" of {self.num_groups} groups"
            )
        if (
            self.group_score == "top2"
            and self.num_groups > 1
            and self.num_experts // self.num_groups < 2
        ):
            raise ValueError(
                f"groups of {self.num_experts // self.num_groups} expert(s) cannot be ranked by"
                " their two best"
            )


def limit_groups(choice: jax.Array, config: RouterConfig) -> jax.Array:
    """Masks the experts [T, E] outside each row's `topk_groups` best groups: with -inf, or with 0
    where softmax scores are ranked by "max" (what DeepSeek-V2 does; the difference shows only if
    fewer than top_k scores are positive)."""
    if config.topk_groups == config.num_groups:
        return choice
    groups = choice.reshape(choice.shape[0], config.num_groups, -1)
    ranking = (
        jax.lax.top_k(groups, 2)[0].sum(-1) if config.group_score == "top2" else groups.max(-1)
    )
    kept = jax.lax.top_k(ranking, config.topk_groups)[1]
    allowed = (kept[:, :, None] == jnp.arange(config.num_groups)).any(1)
    masked = jnp.where(
        allowed[:, :, None], groups, 0.0 if config.group_score == "max" else -jnp.inf
    )
    return masked.reshape(choice.shape)


def route_by_turns(
    tokens: int, rank: Int[Array, ""] | int, config: RouterConfig, ranks: int, imbalance: float
) -> Int[Array, "tokens k"]:
    """Experts whatever the logits say: token by token the next ones, but for a share of tokens that
    is spread evenly and gets experts of the first rank's initial slots, so that this rank has
    `imbalance` times the mean load. A token's experts are distinct."""
    token = jnp.arange(tokens, dtype=jnp.uint32) + jnp.asarray(rank).astype(jnp.uint32)
    turn = token[:, None] * config.top_k + jnp.arange(config.top_k, dtype=jnp.uint32)
    share = 0.0 if ranks == 1 else (imbalance - 1) / (ranks - 1)
    first = max(config.top_k, config.num_experts // ranks)
    spread = token * jnp.uint32(
        2654435769
    )  # 2^32 / golden ratio: multiples lie evenly in [0, 2^32)
    chosen = spread < jnp.uint32(min(share, 1.0) * (2**32 - 1))
    return (turn % jnp.where(chosen[:, None], first, config.num_experts)).astype(jnp.int32)


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    config: RouterConfig,
    experts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Router logits f32 [T, E] and correction bias f32 [E] (None without) -> (weights f32 [T, k],
    experts i32 [T, k]).

    The experts are in descending order of score; equal scores go to the lower expert id
    (`lax.top_k` is stable). experts: i32 [T, k] if they are chosen already: then only weighed.
    """
    scores = affinities(logits.astype(jnp.float32), config.scoring)
    if experts is None:
        choice = scores if bias is None else scores + bias.astype(jnp.float32)
        experts = jax.lax.top_k(limit_groups(choice, config), config.top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + config.normalize_eps)
    return weights * config.scale, experts


def affinities(logits: jax.Array, scoring: str) -> jax.Array:
    """Scores of the experts, f32 [T, E]."""
    match scoring:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case _:
            return jnp.sqrt(jax.nn.softplus(logits))
