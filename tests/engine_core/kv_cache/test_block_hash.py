"""Names of blocks: separate tenants, stable over processes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wavecore.engine_core.kv_cache import block_hash

keys = st.dictionaries(st.sampled_from(["salt", "adapter", "prompt_embeds", "weights"]), st.binary(max_size=8))


@given(keys, keys)
def test_different_keys_never_share_a_root(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    assert (block_hash.root_key(one) == block_hash.root_key(other)) == (one == other)


def test_a_salt_that_spells_an_adapter_stays_a_salt() -> None:
    assert block_hash.root_key({"salt": b"lora-7"}) != block_hash.root_key({"adapter": b"lora-7"})
    assert block_hash.root_key({"salt": b"ab"}) != block_hash.root_key({"salt": b"a", "adapter": b"b"})


@given(st.lists(st.integers(0, 1 << 30), max_size=40), st.integers(0, 40))
def test_growing_step_by_step_gives_the_same_chain(tokens: list[int], cut: int) -> None:
    ids = np.array(tokens, np.int32)
    root = block_hash.root_key({})
    whole: list[bytes] = []
    block_hash.extend(whole, root, ids, 4)
    steps: list[bytes] = []
    block_hash.extend(steps, root, ids[:cut], 4)
    block_hash.extend(steps, root, ids, 4)
    assert whole == steps and len(whole) == len(tokens) // 4


def test_the_same_block_after_another_prefix_has_another_name() -> None:
    root = block_hash.root_key({})
    hashes: list[list[bytes]] = [[], []]
    for chain, first in zip(hashes, (1, 2), strict=True):
        block_hash.extend(chain, root, np.array([first, 0, 7, 7], np.int32), 2)
    assert hashes[0][1] != hashes[1][1]


def test_stable_across_processes() -> None:
    code = (
        "import numpy as np; from wavecore.engine_core.kv_cache import block_hash as b; h = []; "
        "b.extend(h, b.root_key({'salt': b's'}), np.arange(8, dtype=np.int32), 4); print(h[-1].hex())"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    here: list[bytes] = []
    block_hash.extend(here, block_hash.root_key({"salt": b"s"}), np.arange(8, dtype=np.int32), 4)
    assert runs == {here[-1].hex() + "\n"}
