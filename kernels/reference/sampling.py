"""Torch twin of sampling. Draws the same numbers as the kernel: the random bits are integers, hashed the same way."""

import torch
from torch import Tensor

from wavecore.kernels.sampling.rows import GOLDEN, GREEDY_BELOW, MIX_1, MIX_2, SEEN_IN_PROMPT, SamplingRows, part_size

FEW = 1024
_GOLDEN, _MIX_1, _MIX_2 = (factor - (1 << 32) for factor in (GOLDEN, MIX_1, MIX_2))  # as int32


def adjust(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits with bias and bans, of allowed tokens alone, and penalised: what temperature and truncation begin with.

    Args:
        logits: [R, V], float32, bfloat16 or float16. Biases are added in float32: to float32 logits in place, to a
            copy of others.

    Returns:
        float32 [R, V]; 0 in rows that do not sample.
    """
    live = (rows.slots >= 0).nonzero().flatten()
    out = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    out[live] = _adjusted(logits, rows, live)
    return out


def draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The best token of each part of the vocabulary, by logit / temperature + Gumbel noise, of those that truncation
    keeps.

    The order is bias and bans, allowed tokens, penalties, temperature, min_p, top_k, top_p. Of tokens with
    equal logits at the border of top_k or top_p all are kept. The noise depends on (seed, choice, position, token).

    Args:
        logits: as of `adjust`. Truncation needs the whole vocabulary.

    Returns:
        float32 [2, R, parts]: of each `part_size` tokens the best one's value, NaN if any is, and its id, which is
        exact; 0 in rows that do not sample.
    """
    live = (rows.slots >= 0).nonzero().flatten()
    slots, positions = rows.slots[live].long(), rows.positions[live]
    x = _adjusted(logits, rows, live)
    size = part_size(*logits.shape)
    hot = (rows.temperature[slots] >= GREEDY_BELOW).nonzero().flatten()
    if 0 < len(hot) == len(x):
        found = _best_of_parts(_noisy(x, rows, slots, positions), size)
    else:
        found = _best_of_parts(x, size)
        if len(hot):
            found[:, hot] = _best_of_parts(_noisy(x[hot], rows, slots[hot], positions[hot]), size)
    found[1] += rows.first
    best = found.new_zeros(2, len(logits), found.shape[2])
    best[:, live] = found
    return best


def finish(best: Tensor, rows: SamplingRows) -> None:
    """Draw the best token of all parts; of equals the first.

    Args:
        best: float32 [ranks, 2, R, parts], of each rank what `draw` gave.
        rows: see there; what is drawn is written to `tokens` and `faults`, `token_ids` and, if it is here, `counts`.
    """
    live = (rows.slots >= 0).nonzero().flatten()
    slots, positions = rows.slots[live].long(), rows.positions[live]
    values, tokens = best[:, :, live].permute(1, 2, 0, 3).flatten(2)
    place = values.argmax(-1, keepdim=True)
    drawn = tokens.gather(1, place)[:, 0].long()
    bad = ~torch.isfinite(values.gather(1, place)[:, 0])  # argmax finds a NaN
    rows.tokens.fill_(-1)[live] = drawn.int()
    rows.faults.zero_()[live] = bad.int()
    inside = positions < rows.token_ids.shape[1]
    rows.token_ids[slots[inside], positions[inside].long()] = drawn.int()[inside]
    counted, column = rows.count_row[slots], drawn - rows.first
    keep = (counted >= 0) & (column >= 0) & (column < rows.counts.shape[1])
    rows.counts[counted[keep].long(), column[keep]] += 1


def _adjusted(logits: Tensor, rows: SamplingRows, live: Tensor) -> Tensor:
    """float32, of the rows that sample; `adjust` says how."""
    slots = rows.slots[live].long()
    if rows.edits:
        logits = logits.float()
        _edit(logits, rows, live.tolist())
    x = (logits if len(live) == len(logits) else logits[live]).float()
    return _penalise(_mask_allowed(x, rows, slots), rows, slots)


def _noisy(x: Tensor, rows: SamplingRows, slots: Tensor, positions: Tensor) -> Tensor:
    temperature = rows.temperature[slots, None]
    if rows.truncates:
        x = _truncate(x, temperature, rows.top_k[slots], rows.top_p[slots], rows.min_p[slots])
    return x / temperature + gumbel(rows.seed[slots], rows.choice[slots], positions, x.shape[1], rows.first)


def _best_of_parts(x: Tensor, size: int) -> Tensor:
    """float32 [2, N, parts]: the largest of each `size` columns of x [N, V], and its column."""
    full = x.shape[1] // size
    pieces = x[:, : full * size].view(len(x), full, size), x[:, None, full * size :]
    found = [piece.max(-1) for piece in pieces if piece.shape[1] * piece.shape[2]]
    values, places = (torch.cat(columns, 1) for columns in zip(*found, strict=True))
    return torch.stack((values, (places + torch.arange(values.shape[1], device=x.device) * size).float()))


def _edit(logits: Tensor, rows: SamplingRows, live: list[int]) -> None:
    for row in live:
        slot, position = int(rows.slots[row]), int(rows.positions[row])
        begin, end = rows.bias_range[slot].tolist()
        if end > begin:
            now = rows.bias_until[begin:end] > position
            ids, values = rows.bias_ids[begin:end].long() - rows.first, rows.bias_values[begin:end]
            now &= (ids >= 0) & (ids < logits.shape[1])
            ids, values = ids[now], values[now]
            ban = values == -torch.inf
            logits[row, ids[~ban]] += values[~ban]
            logits[row, ids[ban]] = -torch.inf
        for word in range(*rows.word_range[slot].tolist()):
            tokens = rows.word_tokens[rows.word_start[word] : rows.word_start[word + 1]]
            before, banned = len(tokens) - 1, int(tokens[-1]) - rows.first
            if not (before <= position and 0 <= banned < logits.shape[1]):
                continue
            if torch.equal(rows.token_ids[slot, position - before : position], tokens[:-1]):
                logits[row, banned] = -torch.inf


def _mask_allowed(x: Tensor, rows: SamplingRows, slots: Tensor) -> Tensor:
    mask_row = rows.allowed_row[slots].long()
    if not bool((mask_row >= 0).any()):
        return x
    token = torch.arange(x.shape[1], device=x.device)
    allowed = (rows.allowed[mask_row.clamp(min=0)][:, token // 32] >> (token % 32).int()) & 1
    return x.masked_fill((allowed == 0) & (mask_row >= 0)[:, None], -torch.inf)


def _penalise(x: Tensor, rows: SamplingRows, slots: Tensor) -> Tensor:
    count_row = rows.count_row[slots].long()
    chosen = (count_row >= 0).nonzero().flatten()
    if not len(chosen):
        return x
    slots = slots[chosen]
    counts, part = rows.counts[count_row[chosen]], x[chosen]
    repetition = rows.repetition_penalty[slots, None]
    part = torch.where(counts > 0, torch.where(part > 0, part / repetition, part * repetition), part)
    output = counts & (SEEN_IN_PROMPT - 1)
    part = part - rows.frequency_penalty[slots, None] * output
    part = part - rows.presence_penalty[slots, None] * (output > 0)
    return x.index_copy(0, chosen, part)


def _truncate(x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf what min_p, then top_k, then top_p drop of x [N, V] at these temperatures [N, 1]."""
    vocab = x.shape[1]
    use_k, use_p = (top_k > 0) & (top_k < vocab), top_p < 1
    peak = x.amax(-1, keepdim=True)
    cutoff = torch.where(min_p > 0, peak[:, 0] + temperature[:, 0] * torch.log(min_p), -torch.inf)
    if bool((use_k | use_p).any()):
        # A full sort is what costs here, and the largest few logits are nearly always enough.
        few = min(vocab, max(FEW, int(torch.where(use_k, top_k, 0).max())))
        for width in (few, vocab):
            best = x.topk(width).values if width < vocab else x.sort(-1, descending=True).values
            cutoff_k = torch.where(use_k, _at(best, top_k - 1), -torch.inf).maximum(cutoff)
            need = top_p * torch.exp((x - peak) / temperature).masked_fill_(x < cutoff_k[:, None], 0.0).sum(-1)
            mass = torch.exp((best - peak) / temperature).masked_fill_(best < cutoff_k[:, None], 0.0).cumsum(-1)
            if width == vocab or bool((~use_p | (mass[:, -1] >= need)).all()):
                break
        nucleus = (mass < need[:, None]).sum(-1)  # index of the token whose mass reaches top_p
        cutoff = torch.where(use_p, _at(best, nucleus), -torch.inf).maximum(cutoff_k)
    return x.masked_fill(x < cutoff[:, None], -torch.inf)


def _at(values: Tensor, column: Tensor) -> Tensor:
    """values[i, column[i]], columns clamped into range."""
    return values.gather(1, column.clamp(min=0, max=values.shape[1] - 1).long()[:, None])[:, 0]


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, vocab: int, first: int = 0) -> Tensor:
    """Standard Gumbel noise of the tokens from `first` on, float32 [N, vocab], from int64 seeds and int32 choices and
    positions [N]."""
    low = _fmix32(seed.int() ^ _fmix32((choice + 1) * _GOLDEN))
    high = _fmix32((seed >> 32).int() ^ _fmix32((position + 1) * _MIX_1))
    key_1 = _fmix32(low ^ (high * _GOLDEN))
    key_2 = _fmix32(high ^ (low * _MIX_2))
    token = torch.arange(first, first + vocab, dtype=torch.int32, device=seed.device)
    offset = ((key_2 & 0xFFFFFF).float() + 0.5) * 2.0**-56
    return gumbel_of_bits(_fmix32(token * _GOLDEN ^ key_1[:, None], key_2[:, None]), offset[:, None])


def gumbel_of_bits(bits: Tensor, offset: Tensor) -> Tensor:
    """-log(-log(1 - v)) with v uniform in (0, 1), as fine near 0 and near 1 as float32 is.

    Near 0 the noise is large: there it is decided how often tokens of tiny probability are drawn.

    Args:
        bits: int32. The sign says which end v is nearer to, the rest its distance from there in units of 2**-32.
        offset: added to the distance, uniform between 0 and 2**-32. The tokens of a row share it: how often each is
            drawn shows over many rows only.
    """
    tail = (bits ^ (bits >> 31)).float() * 2.0**-32 + offset
    return -torch.log(-torch.where(bits < 0, torch.log(tail), torch.log1p(-tail)))


def _fmix32(x: Tensor, key: Tensor | int = 0) -> Tensor:
    """MurmurHash3's 32-bit finaliser, with a key between its two products, on int32, whose products wrap; masks make
    the arithmetic shifts logical."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX_1
    x = (x ^ ((x >> 13) & 0x7FFFF) ^ key) * _MIX_2
    return x ^ ((x >> 16) & 0xFFFF)
