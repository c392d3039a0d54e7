"""The PNG writer, read back with nothing but zlib."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from wavecore.frontend.client.utilities import heat_map, png


def read_png(data: bytes) -> np.ndarray:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(name + body)
        chunks[name] = body
        at += size + 12
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colour) == (8, 2)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def test_a_png_holds_the_pixels() -> None:
    values = np.tril(np.random.default_rng(0).random((7, 7))).astype(np.float32)
    pixels = read_png(png(heat_map(values)))
    assert np.array_equal(pixels, heat_map(values))
    assert pixels.shape[0] >= 512
    assert tuple(pixels[0, -1]) == (68, 1, 84)  # zero is darkest


@pytest.mark.parametrize("values", [np.zeros((1, 1)), np.ones((3, 5)), np.eye(600)])
def test_any_matrix(values: np.ndarray) -> None:
    pixels = heat_map(values.astype(np.float32))
    assert pixels.shape[0] % values.shape[0] == 0
    assert pixels.dtype == np.uint8
