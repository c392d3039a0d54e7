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
    +-- StartError              a process did not become ready
    +-- EngineDead              an engine process ended or stopped answering

Every message says what happened, where (rank, phase), why (signal, last log lines) and what to do next.
`code` is the stable name that travels on the wire and that clients may match on.
"""

from __future__ import annotations


class WavecoreError(Exception):
    """Base of everything this package raises on purpose."""

    code = "internal"


class ConfigError(WavecoreError, ValueError):
    code = "config"


class ModelError(WavecoreError, ValueError):
    code = "model"


class ValidationError(WavecoreError, ValueError):
    """A request's value is out of bounds.

    Args:
        field: the name of the request field at fault, as the user wrote it.
        message: the value and the way out.
    """

    code = "validation"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NotSupportedError(WavecoreError):
    code = "not_supported"


class ProtocolError(WavecoreError):
    code = "protocol"


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


def _tree(root: type[WavecoreError]) -> dict[str, type[WavecoreError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_CODE = _tree(WavecoreError)
