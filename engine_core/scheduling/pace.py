"""How long steps take, and so how many prompt tokens the next one may hold.

Nothing is known of the device: the size of a step follows from how long earlier ones took. What a step computes of
prompts delays the next tokens of its decoding rows, so with such rows it should take `max_inter_token_ms`. On a CPU any
step should take a second at most, so that aborts, deadlines and new requests need not wait for a whole budget; on other
devices a step of prompts alone holds the whole budget.
"""

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.plan import RunnerInfo, StepPlan

CPU_STEP_SECONDS = 1.0
FIRST_TOKENS = 512  # beside decoding rows, before anything was measured
LEAST_TOKENS = 16
PROBE_STEPS = 64  # so often a step has decoding rows alone, although prompts wait: to see how long those take
UNLIMITED = 1 << 30
DECODE_TIMES = 2.0  # a step may take so many times what its decoding rows alone take, else prompts would hardly move


class StepSize:
    """Prompt tokens that make a step of about `seconds`: scaled by how long the last steps took."""

    def __init__(self, seconds: float, tokens: float) -> None:
        self._seconds = seconds
        self.tokens = int(max(min(tokens, UNLIMITED), LEAST_TOKENS))

    def learn(self, tokens: int, seconds: float, decode_seconds: float) -> None:
        """So many prompt tokens took so long, without the decoding rows beside them, which have `decode_seconds`."""
        scale = (max(self._seconds, DECODE_TIMES * decode_seconds) - decode_seconds) / max(seconds, 1e-6)
        if scale < 1.0:  # fewer than in a step that took too long; a hiccup says little of its tokens
            self.tokens = max(min(self.tokens, int(tokens * max(scale, 0.25))), LEAST_TOKENS)
        else:
            self.tokens = max(self.tokens, int(tokens * min(scale, 2.0)))


class Pace:
    """Learns from each step that came back.

    Attributes:
        token_seconds: what a token takes in a step that is mostly prompt; at first the runner's estimate.
    """

    def __init__(self, config: EngineConfig, info: RunnerInfo) -> None:
        self.token_seconds = info.token_seconds
        self._decode_seconds = 0.0  # of a step of decoding rows alone
        self._mixed = 0  # steps with other rows, too, since then
        estimate = max(info.token_seconds, 1e-9)
        # Without chunked prefill a prompt is computed in one step, however long that takes.
        chunked, gap = config.enable_chunked_prefill, (config.max_inter_token_ms or 0.0) / 1000
        on_cpu = chunked and info.device == "cpu"
        self._any = StepSize(CPU_STEP_SECONDS, CPU_STEP_SECONDS / estimate) if on_cpu else None
        self._beside = StepSize(gap, min(FIRST_TOKENS, gap / estimate)) if chunked and gap else None

    def prompt_tokens(self, beside_decode: bool) -> int:
        """How many the step that is planned now may hold; now and then none, never twice in a row."""
        most = UNLIMITED if self._any is None else self._any.tokens
        if self._beside is None or not beside_decode:
            return most
        if self._mixed >= PROBE_STEPS:
            self._mixed = 0
            return 0
        return min(most, self._beside.tokens)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """A step with rows came back, so long after it was launched and the one before it was done."""
        rows, tokens = plan.num_rows, plan.num_tokens
        if tokens == rows:
            weight = 0.3 if self._decode_seconds else 1.0
            self._decode_seconds += weight * (seconds - self._decode_seconds)
            self._mixed = 0
            return
        decode, decode_seconds = int(np.count_nonzero(plan.query_lens == 1)), 0.0
        if decode:
            decode_seconds = self._decode_seconds = min(self._decode_seconds, seconds)
            self._mixed += 1
        if self._any is not None:
            self._any.learn(tokens - decode, seconds - decode_seconds, decode_seconds)
        if self._beside is not None:
            self._beside.learn(tokens - decode, seconds - decode_seconds, self._decode_seconds)
        if tokens >= 4 * rows:
            weight = 0.2 if self.token_seconds else 1.0
            self.token_seconds += weight * (seconds / tokens - self.token_seconds)
