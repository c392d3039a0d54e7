"""Errors as answers: the one map from an error to its status, in OpenAI's form, with nothing of this machine in it."""

import logging
import re
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException

from wavecore.frontend.serve.http.http_call import Answer, HttpCall
from wavecore.transport import errors

logger = logging.getLogger(__name__)

STATUS: dict[str, HTTPStatus] = {
    errors.ValidationError.code: HTTPStatus.BAD_REQUEST,
    errors.NotSupportedError.code: HTTPStatus.BAD_REQUEST,
    errors.MessageTooLarge.code: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.Overloaded.code: HTTPStatus.TOO_MANY_REQUESTS,
    errors.RequestTimeout.code: HTTPStatus.GATEWAY_TIMEOUT,
    errors.EngineDead.code: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.ResourceError.code: HTTPStatus.SERVICE_UNAVAILABLE,
}
"""Code of an error -> status; all others are faults of ours, 500."""
_MESSAGES = {
    errors.Overloaded.code: "the server has as many requests as it takes; try again later",
    errors.RequestTimeout.code: "the request's deadline passed before its answer was whole",
    errors.EngineDead.code: "the engine that had the request has ended; try again later",
    errors.ResourceError.code: "the server is short of something; try again later",
    errors.NumericalError.code: "the model gave values that are no numbers for this request",
    errors.RequestError.code: "the request ended without its whole answer; try again",
}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "too_large"}
_CODES |= {415: "unsupported_media_type", 431: "too_large", 503: "unavailable"}
# What an error may tell of this machine: files, and where objects lie in memory
_PRIVATE = re.compile(r"(?<![\w.:/])~?/(?:[\w.+@-]+/)+[\w.+@-]*|\b0x[0-9a-fA-F]+|\b\w+://\S+")
_FIELD = re.compile(r"(\w+)(?:=|: )")


class ModelNotFound(HTTPException):
    """404, with the code that clients of OpenAI know."""

    code = "model_not_found"


def error_answer(
    status: int, message: str, param: str | None, code: str, headers: Mapping[str, str] | None = None
) -> Answer:
    """OpenAI's form of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return Answer({"error": {"message": message, "type": kind, "param": param, "code": code}}, status, headers)


def refusal(call: HttpCall, error: Exception, retry_after: int) -> Answer:
    """An error as the answer to a request.

    Args:
        retry_after: seconds after which trying again may help, where it may.
    """
    if isinstance(error, HTTPException):
        code = getattr(error, "code", "") or _CODES.get(error.status_code, "invalid_request")
        answer = error_answer(error.status_code, error.detail, None, code, error.headers)
    elif isinstance(error, errors.ValidationError | errors.NotSupportedError | errors.MessageTooLarge):
        found = _FIELD.match(str(error))
        param = error.field if isinstance(error, errors.ValidationError) else found and found[1]
        answer = error_answer(STATUS[error.code], _PRIVATE.sub("[...]", str(error)), param, error.code)
    else:
        internal = errors.WavecoreError.code
        code = error.code if isinstance(error, errors.WavecoreError) else internal
        status = STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)
        level = logging.WARNING if status == HTTPStatus.INTERNAL_SERVER_ERROR else logging.DEBUG
        logger.log(level, "request %s: %d: %s", call.id, status, error, exc_info=code == internal and error)
        message = _MESSAGES.get(code, "a fault of the server; its log has more under the request's id")
        answer = error_answer(status, f"{message} (request {call.id})", None, code)
    if answer.status_code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        answer.headers["retry-after"] = str(retry_after)
    return answer
