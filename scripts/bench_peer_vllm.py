"""vLLM on the workloads of docs/benchmarks.md, in the settings of bench_gpu.py; bench_compare.py runs it as a process.

    python scripts/bench_peer_vllm.py FOLDER single-in128-out256 ragged-256 --repeats 3

Prints a line of JSON a workload. Needs vllm to be importable, and nothing else of it is needed: token ids in and out,
no tokenizer, its own CUDA graphs; `--settings '{"max_cudagraph_capture_size": 1024}'` sets more.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_gpu import SETTINGS
from bench_workloads import answer_requests, work_named

from wavecore.frontend.cli.workload import WorkItem

# Several GPUs of one host: over its loopback interface, and without NVLink multicast, which not every machine allows.
# The sampler in torch, which needs no compiler.
ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


class Peer:
    """A vLLM engine that measures workloads.

    Raises:
        SystemExit: vllm is not there.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
        except ImportError as error:
            raise SystemExit(f"vLLM is not importable: {error}") from error
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(model=str(folder), disable_log_stats=True, **{**SETTINGS, **settings})

    def seconds(self, work: Sequence[WorkItem]) -> float:
        """Run a batch once, from an empty prefix cache."""
        self._llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": item.prompt} for item in work]
        params = [
            self._params(max_tokens=i.max_tokens, temperature=i.temperature, ignore_eos=True, detokenize=False)
            for i in work
        ]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        if [len(o.outputs[0].token_ids) for o in outputs] != [item.max_tokens for item in work]:
            raise SystemExit("vLLM generated another number of tokens than it was asked for")
        return seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with config.json and weights")
    parser.add_argument("workloads", nargs="*", help="names")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="JSON; in place of or beside those of bench_gpu"
    )
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    peer = Peer(args.model, args.settings)
    if args.answers is not None:
        answer_requests(peer.seconds, args.answers)
        return
    for name in args.workloads:
        work = work_named(name)
        first, *seconds = [round(peer.seconds(work), 4) for _ in range(1 + args.repeats)]
        print(json.dumps({"workload": name, "first": first, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
