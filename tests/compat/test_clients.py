"""Programs that others wrote for vLLM, unchanged but for the launcher: what they answer is what transformers answers.

Each runs in a process of its own, `python -m wavecore.vllm SCRIPT`, on a small random Llama and on SmolLM2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.checkpoints import make_config, save_model
from tests.support.tokenizers_for_tests import write_folder

from wavecore.engine_core.models.files import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LANGCHAIN = """
import json, sys
from langchain_community.llms import VLLM

folder, prompts = json.loads(sys.argv[1])
llm = VLLM(model=folder, trust_remote_code=True, max_new_tokens=12, temperature=0.0, top_k=-1, dtype="float32",
           vllm_kwargs={"max_num_seqs": 4, "kv_cache_memory_gib": 0.2})
texts = [llm.invoke(prompt) for prompt in prompts]
assert texts == [g[0].text for g in llm.generate(prompts).generations]
print(json.dumps(texts))
"""
LLAMA_INDEX = """
import json, sys
from llama_index.llms.vllm import Vllm

folder, prompts = json.loads(sys.argv[1])
llm = Vllm(model=folder, trust_remote_code=True, max_new_tokens=12, temperature=0.0, dtype="float32",
           vllm_kwargs={"swap_space": 0, "gpu_memory_utilization": 0.5, "max_num_seqs": 4, "kv_cache_memory_gib": 0.2})
print(json.dumps([llm.complete(prompt).text for prompt in prompts]))
"""
LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.vllm_causallms import VLLM

folder, prompts = json.loads(sys.argv[1])

def ask(model):
    def requests(kind, arguments):
        return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]

    pairs = [(prompt, " " + prompt[::-1]) for prompt in prompts] + [("", prompts[0]), (prompts[1], " the")]
    until = {"until": ["the", "\\n\\n"], "max_gen_toks": 12, "do_sample": False}
    return [
        [list(found) for found in model.loglikelihood(requests("loglikelihood", pairs))],
        model.loglikelihood_rolling(requests("loglikelihood_rolling", [(" ".join(prompts) * 9,), (prompts[0],)])),
        model.generate_until(requests("generate_until", [(prompt, dict(until)) for prompt in prompts])),
    ]

settings = {"dtype": "float32", "batch_size": 4}
own = VLLM(folder, max_length=250, max_num_seqs=8, kv_cache_memory_gib=0.2, max_gen_toks=12, **settings)
reference = HFLM(folder, max_length=248, device="cpu", **settings)  # its windows over a long text are two tokens longer
print(json.dumps([ask(own), ask(reference), own.tokenizer_name]))
"""


@pytest.fixture(scope="module", params=["random", "SmolLM2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its tokenizer, as transformers reads it."""
    made = tmp_path_factory.mktemp(request.param)
    if request.param == "random":
        save_model(made, make_config("Llama", vocab_size=512, eos_token_id=2))
        return write_folder(made)
    file = resolve_model("default")
    from_file = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**from_file, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are plain numbers by now, and may be saved as such
    del model.config.quantization_config
    model.save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(**from_file).save_pretrained(made)
    return made


PROMPTS = ["The capital of France is", "Once upon a time", "def function(argument): return", "Grüße aus"]


def run(package: str, script: str, folder: Path, tmp_path: Path) -> object:
    if find_spec(package.split(".")[0]) is None:
        pytest.skip(f"needs {package}")
    file = tmp_path / "program.py"
    file.write_text(script)
    words = [sys.executable, "-m", "wavecore.vllm", str(file), json.dumps([str(folder), PROMPTS])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def greedy_texts(folder: Path) -> list[str]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def test_langchain_community(folder: Path, tmp_path: Path) -> None:
    assert run("langchain_community", LANGCHAIN, folder, tmp_path) == greedy_texts(folder)


def test_llama_index(folder: Path, tmp_path: Path) -> None:
    assert run("llama_index.llms.vllm", LLAMA_INDEX, folder, tmp_path) == greedy_texts(folder)


def test_lm_eval(folder: Path, tmp_path: Path) -> None:
    own, theirs, name = run("lm_eval", LM_EVAL, folder, tmp_path)  # type: ignore[misc]
    for (value, greedy), (expected, expected_greedy) in zip(own[0], theirs[0], strict=True):
        assert value == pytest.approx(expected, abs=1e-4) and greedy == expected_greedy
    assert own[1] == pytest.approx(theirs[1], rel=1e-6, abs=1e-4)
    assert own[2] == theirs[2]
    assert name.endswith(folder.name)
