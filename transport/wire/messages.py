"""Every message between processes: a closed set of frozen dataclasses.

On the wire a message is one msgpack array `[PROTOCOL_VERSION, kind, field, ...]` (fields in the order below, but
`number` first; new fields last with defaults) followed by the raw frames of its tensors. `codec` turns messages into
frames and back.

Delivery (see `delivery`). Each direction of a client's connection to an engine is a numbered stream: kinds marked
(numbered) carry `number`, counted from 1 and given when they leave, and are kept until the peer acknowledges them
(`seen`, cumulative). A large one leaves as Pieces, which carry the numbers instead. `epoch` names one life of an
engine; a message of another epoch is dropped.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 3
VOTE_NUMBERS = 7

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]


class FinishReason(IntEnum):
    """Why a request ended; 0 = not ended. Travels as one byte."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    TIMEOUT = 5


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """A tensor on the wire: header in the message, bytes in a frame of their own, never copied above 64 KiB.

    Attributes:
        dtype: a name from `tensors.DTYPES` ("float32", "bfloat16", "int32", ...).
        shape: at most 8 dimensions.
        buffer: C-contiguous bytes; its length equals the product of shape and item size.
    """

    dtype: str
    shape: tuple[int, ...]
    buffer: bytes | memoryview


# --- both ways, on the socket of the numbered stream ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """(numbered) Bytes of a message that is too large to leave at once; other messages go between its pieces.

    Attributes:
        lane: 0 or 1: the queue that the message waited in; of each lane one message is under way.
        sizes: in the first piece of a message, the bytes of each of its frames; else empty.
        data: uint8 [n], the next bytes of a frame. Without bytes and sizes: the rest of the message does not come.
    """

    epoch: bytes
    client_id: bytes
    number: int
    lane: int
    sizes: U32
    data: TensorFrame


@dataclass(frozen=True, slots=True)
class Mark:
    """All up to number `sent` went out ahead of this: what is not there by now is lost, and the answer says so.

    Attributes:
        attempt: how often the sender has sent its unacknowledged messages again. A new attempt begins with a Mark.
    """

    epoch: bytes
    client_id: bytes
    sent: int
    attempt: int


# --- client to engine, over PUSH -> PULL ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    """(numbered) A request. Adding the same (client_id, number) twice is one request.

    Attributes:
        client_id: 16 random bytes that name a session, which is a client in one life of an engine; also the identity
            of its DEALER.
        handle: u32 chosen by the client, unique with `client_id`; names the request from now on.
        prompt: int32 [n] token ids.
        params: `SamplingParams.to_wire()`.
        options: sparse extras: priority (int), cache_salt (str), timeout, queue_timeout, first_token_timeout (s),
            data_parallel_rank (int, for which the client chose this engine), pooling ("mean" or "last"),
            emitted (int: the last `emitted` ids of prompt are output of a resumed request).
        prompt_embeds: float32 or bfloat16 [n, hidden], or None.
    """

    epoch: bytes
    client_id: bytes
    number: int
    handle: int
    prompt: TensorFrame
    params: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    prompt_embeds: TensorFrame | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """(numbered) End these requests. Unknown handles are no error: the request may have ended already."""

    epoch: bytes
    client_id: bytes
    number: int
    handles: U32


@dataclass(frozen=True, slots=True)
class Utility:
    """(numbered) Call one of the engine's named methods; answered by `Result` with the same `call`."""

    epoch: bytes
    client_id: bytes
    number: int
    call: int
    method: str
    args: dict[str, Any] = field(default_factory=dict)


# --- client to engine, over DEALER -> ROUTER ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First word of a client; answered by Ready."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Every second, and after every few messages: `seen` = highest number received in order.

    `gap` asks for everything after `seen` again: it was lost in this `attempt` of the sender (see Mark).
    """

    epoch: bytes
    seen: int
    gap: bool = False
    attempt: int = 0


# --- engine to client, over ROUTER -> DEALER ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """What the engine resolved: model, max_model_len, vocab_size, block_size, num_blocks, dtype, device, limits."""

    epoch: bytes
    resolved: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Output of some requests of one client, one entry a handle. Two of them merge into one for a slow reader.

    Attributes:
        handles: uint32 [n].
        counts: uint32 [n], tokens of each handle in `tokens` (0..k).
        tokens: int32 [sum(counts)].
        finish: uint8 [n] of FinishReason.
        extras: sparse: index into handles -> dict; keys: code and message (errors), stop_token, seed, cached_tokens,
            logprobs / prompt_logprobs / pooled (lists of positions in `frames`).
        frames: tensors named by extras.
    """

    handles: U32
    counts: U32
    tokens: I32
    finish: U8
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    frames: tuple[TensorFrame, ...] = ()


class Load(NamedTuple):
    """How busy an engine is, as one client is told, which knows its own requests.

    Attributes:
        others: tokens of the unfinished requests of other clients: their prompts and the output they may have, of which
            `SamplingParams.counted_output` counts.
        waiting: requests, of all clients, that have not started or were preempted.
        room: tokens of prompts for which slots and KV blocks are free beyond what those need.
    """

    others: int
    waiting: int
    room: int


UNTOLD = Load(0, 0, 1 << 62)  # stands in for the load of an engine that has not told it


@dataclass(frozen=True, slots=True)
class Step:
    """(numbered) Output of one step (or of several, merged) for one client.

    Attributes:
        load: see `Load`.
    """

    epoch: bytes
    number: int
    output: StepTokens
    load: Load = UNTOLD


@dataclass(frozen=True, slots=True)
class Result:
    """(numbered) Answer to a Utility call."""

    epoch: bytes
    number: int
    call: int
    error_code: str
    error: str
    value: Any = None
    frames: tuple[TensorFrame, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Every second, and after every few messages: `seen`, `gap` and `attempt` as in Ping, `load` as in Step."""

    epoch: bytes
    seen: int
    load: Load
    gap: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class UnknownClient:
    """The engine does not know this client: it was silent for too long, or the engine is another life."""

    epoch: bytes


@dataclass(frozen=True, slots=True)
class Dead:
    """Last words of an engine that ends on an error. Also the answer to the Hello of one client too many, by an engine
    that lives on: `code` is then that of Overloaded."""

    epoch: bytes
    code: str
    message: str
    phase: str


@dataclass(frozen=True, slots=True)
class Bye:
    """Last word of a client: the engine forgets it and ends its requests, also those that are still on their way."""

    epoch: bytes


# --- between ranks on several hosts (`io/host_link.py`), beside Ready, Ping, Utility, Result, Dead and Bye ------------


@dataclass(frozen=True, slots=True)
class Join:
    """First word of a rank to rank 0 of its group, repeated until Ready says that all are there.

    Attributes:
        rank: its number.
        host: where it is, for people.
        kind: what must be alike on all hosts, for people, too.
    """

    rank: int
    host: str
    kind: str


@dataclass(frozen=True, slots=True)
class Votes:
    """What the sender knows of an agreement.

    Attributes:
        epoch: of the group's life.
        votes: of some ranks, VOTE_NUMBERS whole numbers each.
        again: the sender lacks those that are not in it, and wants an answer.
    """

    epoch: bytes
    agreement: int
    votes: dict[int, tuple[int, ...]]
    again: bool = False


@dataclass(frozen=True, slots=True)
class StepRecord:
    """(numbered) A record of rank 0 to its workers, or a part of it.

    Attributes:
        record: its kind.
        last: it ends here.
        data: uint8 [n].
    """

    epoch: bytes
    number: int
    record: int
    last: bool
    data: TensorFrame


@dataclass(frozen=True, slots=True)
class Words:
    """What a worker shows rank 0: all of its words, as they are now."""

    epoch: bytes
    words: list[int]


OfClients = (
    Add | Abort | Utility | Hello | Ping | Ready | Step | Result | Heartbeat | UnknownClient | Dead | Bye | Piece | Mark
)
Message = OfClients | Join | Votes | StepRecord | Words
Up = Add | Abort | Utility  # numbered, from client to engine
Down = Step | Result  # ... and back
Numbered = Up | Down | Piece
