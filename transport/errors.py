"""The one exception tree.

    WavecoreError
    +-- ConfigError             a setting that cannot work (also a ValueError)
    +-- ModelError              model files: missing, truncated, unknown, unsafe (also a ValueError)
    +-- ValidationError         one request's value is out of bounds (also a ValueError)
    +-- NotSupportedError       a known feature that this version refuses by name
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
(0 is a clean end, 130 an interrupt.)
"""

from __future__ import annotations

import errno
from typing import Any

RESOURCE_ERRNOS = (
    *(errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC),
    errno.EAGAIN,  # of a fork: no process or thread is left
)
MORE_MEMORY = "give the machine or container more memory"


class WavecoreError(Exception):
    """Base of everything this package raises on purpose."""

    code = "internal"
    exit_code = 5


class ConfigError(WavecoreError, ValueError):
    code = "config"
    exit_code = 2


class ModelError(WavecoreError, ValueError):
    code = "model"
    exit_code = 4


class ValidationError(WavecoreError, ValueError):
    """A request's value is out of bounds.

    Args:
        field: the name of the request field at fault, as the user wrote it.
        message: the value and the way out.
    """

    code = "validation"
    exit_code = 2

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NotSupportedError(WavecoreError):
    code = "not_supported"
    exit_code = 2


class ProtocolError(WavecoreError):
    """Bytes that break the protocol.

    Attributes:
        partial: message class and the fields that were sound before the fault, so that whoever sent it can be answered.
    """

    code = "protocol"
    partial: tuple[type, dict[str, Any]] | None = None


class MessageTooLarge(ProtocolError):
    code = "too_large"


class RequestError(WavecoreError):
    code = "request"


class Overloaded(RequestError):
    code = "overloaded"


class RequestTimeout(RequestError, TimeoutError):
    code = "timeout"


class NumericalError(RequestError):
    code = "numerical"


class ResourceError(WavecoreError):
    code = "resource"
    exit_code = 3


class StartError(WavecoreError):
    code = "start"


class EngineDead(WavecoreError):
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
