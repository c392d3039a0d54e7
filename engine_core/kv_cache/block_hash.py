"""Names of full KV blocks: a sha256 chain over raw int32 token bytes.

hash[i] = sha256(hash[i-1] + the block's token bytes) and hash[-1] = sha256 of the *root key*. The root key is an
encoding of (tag, value) pairs with explicit lengths, so no two different sets of keys give the same bytes: a salt that
spells an adapter's name is still a salt. sha256 rather than Python's hash(): stable across processes, and nobody can
search for a prompt that collides with another tenant's.
"""

import hashlib
import struct
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def root_key(keys: Mapping[str, bytes]) -> bytes:
    """Digest [32] of what besides the tokens decides a block's content: cache salt, prompt embeds, adapter, weights."""
    digest = hashlib.sha256(b"wavecore kv 1")
    for tag, value in sorted(keys.items()):
        name = tag.encode()
        digest.update(struct.pack("<II", len(name), len(value)))
        digest.update(name)
        digest.update(value)
    return digest.digest()


def extend(hashes: list[bytes], root: bytes, tokens: Tokens, block_size: int) -> None:
    """Append the hashes of the full blocks of `tokens` (int32 [n], contiguous) that `hashes` does not hold yet."""
    data = tokens.data.cast("B")
    stride = 4 * block_size
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * stride, len(data) - stride + 1, stride):
        digest = hashlib.sha256(parent)
        digest.update(data[start : start + stride])
        parent = digest.digest()
        hashes.append(parent)
