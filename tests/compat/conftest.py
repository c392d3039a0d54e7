"""Programs written for vLLM: a small model that they run, in the room's own LLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.checkpoints import make_config, save_model
from tests.support.tokenizers_for_tests import write_folder

from wavecore.vllm import LLM

SMALL = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_memory_gib": 0.05, "use_tqdm_on_load": False}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer of 512 tokens; greedy texts repeat little, its EOS is token 7."""
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, make_config("Llama", vocab_size=512, eos_token_id=7))
    write_folder(folder)
    return folder


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    made = LLM(str(tiny_llama), max_logprobs=-1, **SMALL)
    yield made
    made.shutdown()
