"""Torch twin of the mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def moe(
    x: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    kv_slots: Tensor,
    top_k: int,
    normalize: bool,
) -> Tensor:
    """Each token through the experts with the highest scores, weighted by the softmax of all scores (Mixtral,
    arXiv 2401.04088).

    Args:
        x: [T, H].
        scores: [T, E], of the router.
        gate_up: [E * 2 * I, H], of each expert gate, then up.
        down: [E * H, I].
        kv_slots: int32 [T]; tokens with -1 are padding, and go to no expert.
        top_k: experts of a token; at most E.
        normalize: the weights of a token's experts add up to 1.

    Returns:
        [T, H]; zero for padding.
    """
    experts, hidden = scores.shape[1], x.shape[1]
    weights, chosen = route(scores, top_k, normalize)
    out = torch.zeros_like(x)
    live = kv_slots >= 0
    for expert in sorted(set(chosen[live].flatten().tolist())):
        token, place = ((chosen == expert) & live[:, None]).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up.view(experts, -1, hidden)[expert]).chunk(2, -1)
        part = F.linear(F.silu(gate) * up, down.view(experts, hidden, -1)[expert])
        out.index_add_(0, token, part * weights[token, place, None])
    return out


def route(scores: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights, of the scores' dtype, and int64 numbers of each token's experts [T, top_k]."""
    weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(scores.dtype), chosen
