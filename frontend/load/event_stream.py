"""A streamed answer of an OpenAI server: one exchange of HTTP/1.1 on a connection of its own, and its events."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

from wavecore.transport.errors import ConfigError, RequestError

MAX_READ = 1 << 16


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class StreamedChoice(msgspec.Struct):
    """Of a completion (`text`) or of a chat."""

    text: str | None = None
    delta: Delta = Delta()


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StreamedEvent(msgspec.Struct):
    """What is read of an event."""

    choices: list[StreamedChoice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        return "".join(choice.text or choice.delta.content or "" for choice in self.choices)


_decode = msgspec.json.Decoder(StreamedEvent).decode


def split_url(url: str) -> SplitResult:
    """Raises:
    ConfigError: no URL of http or https with a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url must be http://HOST:PORT or https://HOST, not {url!r:.80}")
    return parts


class _Answer:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.body, self.complete = b"", False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


async def events(url: str, body: Mapping[str, Any], api_key: str = "") -> AsyncIterator[StreamedEvent]:
    """POST a request that asks for a stream.

    Raises:
        RequestError: no connection, a status other than 200, an error event, or an answer without its end.
    """
    parts, answer = split_url(url), _Answer()
    port, writer = parts.port or (443 if parts.scheme == "https" else 80), None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=parts.scheme == "https" or None)
        data = msgspec.json.encode(body)
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n{key}Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        parser = httptools.HttpResponseParser(answer)
        while not answer.complete and (read := await reader.read(MAX_READ)):
            parser.feed_data(read)
            if parser.get_status_code() != 200:
                continue  # an error is told whole
            *lines, answer.body = answer.body.split(b"\n")
            for line in lines:
                name, _, value = line.partition(b":")
                if name != b"data":  # the end of an event, or a comment that keeps the connection alive
                    continue
                if value.strip() == b"[DONE]":
                    return
                found = _decode(value)
                if found.error is not None:
                    raise RequestError(f"error event: {found.error!r:.300}")
                yield found
        end = "" if answer.complete else ", and the answer has no end"
        raise RequestError(f"status {parser.get_status_code()}{end}: {answer.body.decode(errors='replace'):.300}")
    except (OSError, httptools.HttpParserError, msgspec.DecodeError) as error:
        raise RequestError(f"no answer of an OpenAI server: {error}") from error
    finally:
        if writer is not None:
            writer.close()
