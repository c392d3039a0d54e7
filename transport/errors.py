"""The one exception tree.

    WavecoreError
    +-- ConfigError             a setting that cannot work (also a ValueError)
    +-- ModelError              model files: missing, truncated, unknown, unsafe (also a ValueError)
    +-- ValidationError         one request's value is out of bounds (also a ValueError)
    +-- NotSupportedError       a known feature that this version refuses by name (also a ValueError)
    |   +-- NotSupportedName    a method or attribute of that kind (also an AttributeError)
    +-- ProtocolError           bytes on a wire that break the protocol
    |   +-- MessageTooLarge     refused before sending: the peer would be cut off without a word
    +-- RequestError            one request ended without its answer
    |   +-- Overloaded          refused at the door; try again later
    |   +-- RequestTimeout      a deadline of the request passed (also a TimeoutError)
    |   +-- NumericalError      NaN or infinity in the request's logits
    +-- ResourceError           a port, memory, file descriptors: the machine cannot give what is needed
    +-- StartError              a process did not become ready
    +-- EngineDead              an engine process ended or stopped answering

Every message says what happened, where (rank, phase), why (signal, last log lines) and what to do next.
`code` is the stable name that travels on the wire and that clients may match on. `exit_code` is what a program ends
with when nobody handles the error: 2 usage, 3 port or other resource, 4 model, 5 an engine did not start or died.
(0 is a clean end, 128 + N signal N.)
"""

import errno
from typing import Any

_NAMES = "EADDRINUSE EADDRNOTAVAIL EAGAIN EMFILE ENFILE ENOMEM ENOSPC EDQUOT EROFS EACCES"
RESOURCE_ERRNOS = [getattr(errno, name) for name in _NAMES.split()]  # EAGAIN, of a fork: no process or thread is left
MORE_MEMORY = "give the machine or container more memory"


class WavecoreError(Exception):
    """Base of everything that this package raises on purpose; by itself, a fault inside that has no class of its own.

    Report the latter, with the engine's log.
    """

    code = "internal"
    exit_code = 5


class ConfigError(WavecoreError, ValueError):
    """A setting is unknown, of the wrong kind, or cannot work here; raised before an engine starts, or by its start.

    The message names the setting and where it came from. Correct it: docs/settings.md has them all.
    """

    code = "config"
    exit_code = 2


class ModelError(WavecoreError, ValueError):
    """A model's files are missing, damaged, unsafe, or of a kind that is not supported; raised by a start.

    The message names the file. Correct or fetch it again, or name another model.
    """

    code = "model"
    exit_code = 4


class ValidationError(WavecoreError, ValueError):
    """One value of a call is of the wrong kind or out of bounds; nothing was sent, or the engine refused it.

    Correct the parameter called `field`. Other requests are not concerned.

    Args:
        field: the name of the request field at fault, as the user wrote it.
        message: the value and the way out.
    """

    code = "validation"
    exit_code = 2

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NotSupportedError(WavecoreError, ValueError):
    """Something that exists elsewhere, in vLLM say, and not in this version; refused by name.

    The message says what to use in its place.
    """

    code = "not_supported"
    exit_code = 2


class NotSupportedName(NotSupportedError, AttributeError):
    """A method or attribute that exists elsewhere; `hasattr` finds it missing.

    The message says what to use in its place.
    """

    code = "not_supported_name"


class ProtocolError(WavecoreError):
    """Bytes of a client or an engine break the protocol of the wire; they are dropped.

    A program meets it where the two are of different versions, or something else writes to the sockets. Attach with the
    engine's version.

    Attributes:
        partial: message class and the fields that were sound before the fault, so that whoever sent it can be answered.
    """

    code = "protocol"
    partial: tuple[type, dict[str, Any]] | None = None


class MessageTooLarge(ProtocolError):
    """A request is larger than one message may be; refused before sending, and nothing else is concerned.

    Send less at once: a shorter prompt, fewer choices, smaller prompt embeddings.
    """

    code = "too_large"


class RequestError(WavecoreError):
    """One request ended without its whole answer: the client was closed, or the engine met a fault of this request.

    What it had until then is in its output. Send it again, if the message does not say that it cannot work.
    """

    code = "request"


class Overloaded(RequestError):
    """The engine's queue or its number of clients is full, or it is shutting down: it took nothing of this request.

    Try again later. `LLM.generate` does so by itself; see `max_num_queued_reqs` and `max_num_queued_bytes`.
    """

    code = "overloaded"


class RequestTimeout(RequestError, TimeoutError):
    """A deadline passed: of a request that no engine answered any more, or of a call such as `step_stats`.

    A request that its engine ends in time has finish_reason "timeout" instead, with what it had. Allow more time, or
    see why the engine is slow (`debug_requests`, `log_stats`).
    """

    code = "timeout"


class NumericalError(RequestError):
    """The model gave NaN or infinity for this request; it ended, others of its batch did not.

    Often a checkpoint that overflows in float16: try dtype="bfloat16" or "float32".
    """

    code = "numerical"


class ResourceError(WavecoreError):
    """The machine cannot give what is needed: memory, a port, file descriptors, room or permission on a disk.

    The message says which, and the setting that asks for less where there is one.
    """

    code = "resource"
    exit_code = 3


class StartError(WavecoreError):
    """An engine did not become ready: its process ended without a cause of its own, was too slow, or does not answer.

    Its last lines stand in the exception's notes. Raise `ready_timeout` if it was only slow.
    """

    code = "start"


class EngineDead(WavecoreError):
    """The engine that had this request, or every engine, has ended or cannot be reached; the message has the cause.

    `has_engine()` says whether another one takes over; then send the request again. `resume=True` does so by itself.
    """

    code = "engine_dead"


def from_code(code: str, message: str) -> WavecoreError:
    """The exception that a (code, message) pair from the wire stands for; unknown codes give RequestError."""
    if code == ValidationError.code:
        field, _, rest = message.partition(": ")
        return ValidationError(field, rest)
    return _BY_CODE.get(code, RequestError)(message)


def as_wavecore_error(error: BaseException, memory_advice: str = MORE_MEMORY) -> WavecoreError:
    """Any exception as one of the tree: what the machine refused is a ResourceError, a surprise is internal.

    Args:
        memory_advice: what to do when memory runs out, from whoever knows what needs it.
    """
    if isinstance(error, WavecoreError):
        return error
    if isinstance(error, MemoryError):
        return ResourceError(f"out of memory ({error}); {memory_advice}")
    text = f"{type(error).__name__}: {error}"
    return ResourceError(text) if getattr(error, "errno", None) in RESOURCE_ERRNOS else WavecoreError(text)


def _tree(root: type[WavecoreError]) -> dict[str, type[WavecoreError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_CODE = _tree(WavecoreError)
