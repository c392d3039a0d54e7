"""Whose options made a step too big? A guess, for a step that ran out of memory although steps were small already."""

from __future__ import annotations

from collections.abc import Iterable

from wavecore.engine_core.plan import RunnerInfo
from wavecore.engine_core.request import Request

SMALL_STEP = 256  # tokens; of a larger step its own size is the first suspect
POSITIONS_AT_ONCE = 64  # prompt positions whose log-probabilities exist at once, about
Row = tuple[Request, int, bool]


def most_demanding(rows: Iterable[Row], info: RunnerInfo) -> tuple[Request, str] | None:
    """The request whose options need most memory in a step, and their names; None where no row has any.

    Args:
        rows: request, query length and whether it samples, of each row.
    """
    worst: tuple[Request, str] | None = None
    most = 0
    for request, query_len, samples in rows:
        needs = _extra_bytes(request, query_len, samples, info)
        if (size := sum(needs.values())) > most:
            most, worst = size, (request, ", ".join(needs))
    return worst


def _extra_bytes(request: Request, query_len: int, samples: bool, info: RunnerInfo) -> dict[str, int]:
    """About what each rare option of a row takes beside a plain row: two float32 copies of logits, or hidden states."""
    params, needs = request.params, {}
    if request.prompt_embeds is not None:
        needs["prompt_embeds"] = 4 * info.hidden_size * query_len
    if request.options.pooling:
        needs["pooling"] = 4 * info.hidden_size * query_len
    if params.prompt_logprobs is not None and query_len > 1:
        needs["prompt_logprobs"] = 8 * info.vocab_size * min(query_len, POSITIONS_AT_ONCE)
    if params.logprobs is not None and samples:
        needs["logprobs"] = 8 * info.vocab_size
    return needs
