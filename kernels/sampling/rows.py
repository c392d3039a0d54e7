"""The device tensors that say how each row of logits is sampled, and the numbers that kernel and twin agree on.

Parameters are columns by slot and stay where they are between steps; a step names the slots. Lists of odd length
(bias, bans, bad words) lie in pools, and a slot holds its [begin, end) there. Rows of vocabulary size (penalty
counts, allowed tokens) lie in pools too, and a slot holds a row number or -1.

Where ranks share the vocabulary, each has some of its columns: of logits, counts and allowed tokens alike.
"""

from dataclasses import dataclass

from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy: dividing by them could overflow."""
GOLDEN, MIX_1, MIX_2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
"""Of the hash that makes the random bits: 2**32 / phi, and the two factors of MurmurHash3's fmix32."""
NO_LIMIT = (1 << 31) - 1
PART = 1024
"""Tokens that `draw` looks at together."""
PROGRAMS = 2048
"""Of `draw`, about as many as keep a GPU busy: with more rows each goes through more tokens."""
SEEN_IN_PROMPT = 1 << 30
"""Bit of `counts` that marks a token of the prompt; the bits below count it in the output."""


def part_size(num_rows: int, columns: int) -> int:
    """Columns of which `draw` finds the best, a multiple of PART."""
    return PART * min(max(num_rows * columns // (PROGRAMS * PART), 1), -(-columns // PART))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What sampling reads, and where it writes; V is the vocabulary or a rank's columns of it, S the slots, R the rows.

    Attributes:
        slots: int32 [R]; -1 for padding and for rows that do not sample: their token is -1.
        positions: int32 [R], place in the sequence of the token to draw (the number of tokens before it).
        token_ids: int32 [S, max_len]; the drawn token is written at [slot, position] where that lies inside.
        temperature: float32 [S]; below GREEDY_BELOW is greedy.
        top_k: int32 [S], 0 keeps all.
        top_p, min_p: float32 [S]; 1 and 0 keep all.
        seed: int64 [S].
        choice: int32 [S].
        presence_penalty, frequency_penalty, repetition_penalty: float32 [S].
        count_row: int32 [S], row of `counts` of a slot with penalties, else -1.
        counts: int32 [N, V], occurrences in the output plus SEEN_IN_PROMPT; `finish` counts the token drawn.
        allowed_row: int32 [S], row of `allowed`, or -1 where every token may come.
        allowed: int32 [M, ceil(V / 32)], bit i % 32 of word i // 32 is column i.
        bias_range: int32 [S, 2], begin and end in the three lists below.
        bias_ids, bias_values, bias_until: int32, float32, int32 [B]: `value` (-inf bans) is added to the logit of
            `id` while position < until. A token comes at most once a slot with a finite value.
        word_range: int32 [S, 2], begin and end in `word_start`.
        word_start: int32 [W + 1], first token of each bad word.
        word_tokens: int32 [...]: a word's last token is banned where the tokens before it have just come.
        tokens: int32 [R], written: the drawn token, or -1.
        faults: int32 [R], written: 1 where a row that samples holds NaN or no finite maximum (its token means nothing).
        truncates: whether a row may use top_k, top_p or min_p (an upper bound; False saves a pass).
        edits: whether a row may use bias or bad words (likewise).
        first: vocabulary id of column 0.
    """

    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    count_row: Tensor
    counts: Tensor
    allowed_row: Tensor
    allowed: Tensor
    bias_range: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    bias_until: Tensor
    word_range: Tensor
    word_start: Tensor
    word_tokens: Tensor
    tokens: Tensor
    faults: Tensor
    truncates: bool = True
    edits: bool = True
    first: int = 0
