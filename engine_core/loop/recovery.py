"""What becomes of a step that did not fit into memory: who is at fault ends, and all others are computed again."""

import logging

from wavecore.engine_core.plan import LOGPROB_CHUNK, OutOfMemory, RunnerInfo, StepPlan
from wavecore.engine_core.request import Request, State
from wavecore.engine_core.scheduling.requests import Requests
from wavecore.engine_core.scheduling.step_budget import StepBudget
from wavecore.transport.wire.messages import FinishReason

logger = logging.getLogger(__name__)

SMALL_STEP = 256  # tokens; of a larger step its own size is the first suspect
Row = tuple[Request, int, bool]  # request, query length, whether it samples


def recover(fault: OutOfMemory, failed: StepPlan, requests: Requests, budget: StepBudget, info: RunnerInfo) -> None:
    """A step failed, and the runner dropped every step in flight: end the request at fault and queue the others."""
    alone = failed.num_tokens == 1  # tried again and again: nothing new
    logger.log(logging.DEBUG if alone else logging.ERROR, "a step failed: %s", fault)
    request, error = _at_fault(fault, failed, requests, budget, info)
    requests.roll_back("a failed step is computed again")
    if request is not None and request.state is not State.ENDED:
        requests.end(request, FinishReason.ERROR, error)


def _at_fault(
    fault: OutOfMemory, failed: StepPlan, requests: Requests, budget: StepBudget, info: RunnerInfo
) -> tuple[Request | None, OutOfMemory]:
    """Steps become smaller; who must end, and what to tell its client.

    Nobody in the first burst of failures, and while steps are large. Then whose rare options need most: a guess.
    Without such options smaller steps go on to be tried, down to one token. A row that has failed alone, whenever it
    was tried for seconds, is no guess.
    """
    if not failed.num_rows:
        return None, fault
    budget.shrink(failed.num_tokens)
    who = [requests.slots.at(slot) for slot in failed.slots.tolist()]
    if failed.num_tokens == 1:
        return who[0] if budget.hopeless else None, fault
    if budget.failures == 1 or failed.num_tokens > SMALL_STEP:
        return None, fault
    found = most_demanding(list(zip(who, failed.query_lens.tolist(), failed.samples.tolist(), strict=True)), info)
    if found is None:
        return None, fault
    request, options = found
    return request, OutOfMemory(f"{fault}; of its rows this request's needs most memory, for {options}")


def most_demanding(rows: list[Row], info: RunnerInfo) -> tuple[Request, str] | None:
    """The request whose options need most memory in a step, and their names; None where no row has any."""
    needs = [_extra_bytes(*row, info) for row in rows]
    most = max(range(len(rows)), key=lambda row: sum(needs[row].values()))
    return (rows[most][0], ", ".join(needs[most])) if needs[most] else None


def _extra_bytes(request: Request, query_len: int, samples: bool, info: RunnerInfo) -> dict[str, int]:
    """About what each rare option of a row takes beside a plain row: two float32 copies of logits, or hidden states."""
    params, states, logits = request.params, 4 * info.hidden_size * query_len, 8 * info.vocab_size
    chunk = min(query_len, LOGPROB_CHUNK)
    needs = (
        ("prompt_embeds", request.prompt_embeds is not None, states),
        ("pooling", request.options.pooling, states),
        ("prompt_logprobs", params.prompt_logprobs is not None and query_len > 1, logits * chunk),
        ("logprobs", params.logprobs is not None and samples, logits),
    )
    return {name: size for name, asked, size in needs if asked}
