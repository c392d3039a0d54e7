"""Torch twin of the mixture of experts."""

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
    first: int = 0,
) -> Tensor:
    """Each token through the experts with the highest scores, weighted by the softmax of all scores (Mixtral,
    arXiv 2401.04088).

    Args:
        x: [T, H].
        scores: [T, E], of the router.
        gate_up: [E' * 2 * I, H], of each of E' experts gate, then up.
        down: [E' * H, I].
        kv_slots: int32 [T]; tokens with -1 are padding, and go to no expert.
        top_k: experts of a token; at most E.
        normalize: the weights of a token's experts add up to 1.
        first: the experts are those from this one on; what tokens want of the others is not computed.

    Returns:
        [T, H]: the sum over these experts; zero for padding, and for a token that has none of them.
    """
    hidden = x.shape[1]
    experts = len(down) // hidden
    weights, chosen = route(scores, top_k, normalize)
    out = torch.zeros_like(x)
    chosen = (chosen - first).masked_fill((kv_slots < 0)[:, None], -1)
    for expert in sorted(set(chosen[(chosen >= 0) & (chosen < experts)].tolist())):
        token, place = (chosen == expert).nonzero(as_tuple=True)
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
