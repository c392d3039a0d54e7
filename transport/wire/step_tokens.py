"""`StepTokens`, what steps made for one client: build, check, measure and merge them."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.transport.errors import ProtocolError
from wavecore.transport.wire.checks import table
from wavecore.transport.wire.messages import FinishReason, StepTokens, TensorFrame

_LAST_REASON = max(FinishReason)
FRAME_LISTS = ("logprobs", "prompt_logprobs", "pooled")  # extras that are positions in StepTokens.frames


def finish_rows(handles: Iterable[int], reason: FinishReason, code: str = "", message: str = "") -> StepTokens:
    """StepTokens that end each of these requests without another token; `code` and `message` say why."""
    rows = np.fromiter(handles, np.uint32)
    why: dict[str, Any] = {"code": code, "message": message}
    extras = {i: dict(why) for i in range(len(rows) if code else 0)}
    return StepTokens(rows, np.zeros_like(rows), np.empty(0, np.int32), np.full(len(rows), reason, np.uint8), extras)


def check_step_tokens(value: StepTokens) -> None:
    """Raise ProtocolError unless the arrays fit together and extras name rows and frames that are there."""
    rows = len(value.handles)
    counts, codes, tokens, told = len(value.counts), len(value.finish), len(value.tokens), int(value.counts.sum())
    if counts != rows or codes != rows or told != tokens:
        sizes = f"{rows} handles, {counts} counts, {codes} finish codes, {tokens} tokens for a sum of {told}"
        raise ProtocolError(f"output of {sizes}")
    if rows and value.finish.max() > _LAST_REASON:
        raise ProtocolError(f"unknown finish code {int(value.finish.max())}")
    if type(value.extras) is not dict:
        raise ProtocolError("extras must be a map")
    for index, extra in value.extras.items():
        if type(index) is not int or not 0 <= index < rows:
            raise ProtocolError(f"extras for row {index!r:.20} of {rows}")
        table(extra)
        for name in FRAME_LISTS:
            positions = extra.get(name, ())
            if type(positions) not in (list, tuple):
                raise ProtocolError(f"{name} must be a list of frames")
            for position in positions:
                if type(position) is not int or not 0 <= position < len(value.frames):
                    raise ProtocolError(f"{name} names frame {position!r:.20} of {len(value.frames)}")


def size_of(output: StepTokens) -> int:
    """About how many bytes it holds."""
    arrays = output.handles.nbytes + output.counts.nbytes + output.tokens.nbytes + output.finish.nbytes
    return arrays + sum(len(frame.buffer) for frame in output.frames) + 64 * len(output.extras)


def rows_of(output: StepTokens, keep: npt.NDArray[np.bool_]) -> StepTokens:
    """What it says of the rows that `keep` marks."""
    extras: dict[int, dict[str, Any]] = {}
    frames: list[TensorFrame] = []
    for place, index in enumerate(np.flatnonzero(keep).tolist()):
        if index in output.extras:
            extra = extras[place] = dict(output.extras[index])
            for name in extra.keys() & FRAME_LISTS:
                positions, extra[name] = extra[name], [len(frames) + i for i in range(len(extra[name]))]
                frames += [output.frames[position] for position in positions]
    tokens = output.tokens[np.repeat(keep, output.counts)]
    return StepTokens(output.handles[keep], output.counts[keep], tokens, output.finish[keep], extras, tuple(frames))


def merge(*parts: StepTokens) -> StepTokens:
    """One that says what `parts`, in this order, say: a row a handle, in order of first appearance.

    Tokens of a handle are joined; its finish code and plain extras are the last ones given; extras that name frames
    (`FRAME_LISTS`) are joined, their positions moved to the joined frames.
    """
    if len(parts) == 1:
        return parts[0]
    handles = np.concatenate([part.handles for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    unique, first, row_of = np.unique(handles, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")  # np.unique sorts by value; rows go by first appearance
    rank = np.empty(len(unique), np.intp)
    rank[order] = np.arange(len(unique))
    rows = rank[row_of]

    merged_counts = np.bincount(rows, weights=counts, minlength=len(unique)).astype(np.uint32)
    tokens = np.concatenate([part.tokens for part in parts])
    tokens = tokens[np.argsort(np.repeat(rows, counts), kind="stable")]
    finish = np.zeros(len(unique), np.uint8)
    codes = np.concatenate([part.finish for part in parts])
    ended = np.flatnonzero(codes)
    finish[rows[ended]] = codes[ended]

    extras: dict[int, dict[str, Any]] = {}
    row_base = frame_base = 0
    for part in parts:
        for index, extra in part.extras.items():
            joined = extras.setdefault(int(rows[row_base + index]), {})
            for name, value in extra.items():
                if name in FRAME_LISTS:
                    joined[name] = [*joined.get(name, ()), *(frame_base + position for position in value)]
                else:
                    joined[name] = value
        row_base += len(part.handles)
        frame_base += len(part.frames)
    frames = tuple(frame for part in parts for frame in part.frames)
    return StepTokens(unique[order], merged_counts, tokens, finish, extras, frames)
