"""What an engine checks at its door: an Add becomes a `Request`, or the client is told why not.

All of it runs in the input thread, so that checking and hashing a long prompt overlap with the device.
"""

import hashlib
import math
import secrets
from dataclasses import replace
from functools import lru_cache

import msgpack
import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.kv_cache import block_hash
from wavecore.engine_core.plan import F32, I32, RunnerInfo
from wavecore.engine_core.request import Request
from wavecore.transport.errors import Overloaded, ValidationError
from wavecore.transport.wire.messages import Add, TensorFrame
from wavecore.transport.wire.tensors import to_numpy

SAME = 8  # parameters that are remembered
NO_KEYS = block_hash.root_key({})


def request_from_add(add: Add, info: RunnerInfo, config: EngineConfig) -> Request:
    """Check everything again, resolve what the engine decides, and hash the prompt's blocks.

    Raises:
        ValidationError: naming the field and the way out.
    """
    tokens = _prompt(add.prompt, info.vocab_size)
    params = _params(msgpack.packb(add.params), info.vocab_size, info.eos_token_ids, info.max_logprobs)
    if params.seed is None:
        params = params.seeded(_seed(config.seed, add.handle, tokens))
    options = RequestOptions.from_wire(add.options)
    if options.queue_timeout is None and config.max_queue_seconds is not None:
        options = replace(options, queue_timeout=config.max_queue_seconds)
    num_prompt = len(tokens) - options.emitted
    if num_prompt < 1:
        raise ValidationError("emitted", f"{options.emitted} of {len(tokens)} tokens leaves no prompt")
    params.check_prompt(num_prompt)
    most = math.inf if params.max_tokens is None else num_prompt + params.max_tokens
    request = Request(
        client=add.client_id,
        handle=add.handle,
        tokens=tokens,
        num_prompt=num_prompt,
        params=params,
        limit=int(min(most, info.max_model_len, _capacity(info))),
        stop_ids=(*(() if params.ignore_eos else info.eos_token_ids), *(params.stop_token_ids or ())),
        options=options,
        prompt_embeds=None if add.prompt_embeds is None else _embeds(add.prompt_embeds, num_prompt, info.hidden_size),
    )
    _check_together(request)
    _check_length(request, info, config)
    if config.enable_prefix_caching:
        _hash_blocks(request, info.block_size)
    return request


# Requests that come together mostly want the same. Equal bytes are equal values of equal types (True and 1 are not), so
# what was checked once holds again. Few are kept, as each may hold a megabyte.


@lru_cache(SAME)
def _params(packed: bytes, vocab_size: int, eos_token_ids: tuple[int, ...], max_logprobs: int) -> SamplingParams:
    params = SamplingParams.from_wire(msgpack.unpackb(packed, strict_map_key=False)).of_model(vocab_size)
    params.check_model(vocab_size, eos_token_ids, max_logprobs)
    return params


def check_room(request: Request, config: EngineConfig, queued_reqs: int, queued_bytes: int) -> None:
    """Refuse a request for which the waiting queue has no room.

    Raises:
        Overloaded: with what waits already and the setting that bounds it.
        ValidationError: it would not even fit into an empty queue.
    """
    for field, size, queued, unit, setting in (
        ("n", request.params.n, queued_reqs, "requests", "max_num_queued_reqs"),
        ("prompt", request.nbytes, queued_bytes, "bytes of prompts", "max_num_queued_bytes"),
    ):
        limit = getattr(config, setting)
        if size > limit:
            raise ValidationError(field, f"{size} is above {setting} {limit}")
        if queued + size > limit:
            raise Overloaded(f"{queued} {unit} wait already, limit {setting} {limit}; try again later")


def _check_together(request: Request) -> None:
    """What each value allows of the others."""
    first, params, emitted = request.handle, request.params, request.options.emitted
    if not 0 <= first <= (1 << 32) - params.n:
        raise ValidationError("n", f"handles {first} to {first + params.n - 1} do not fit into 32 bits")
    if params.n != 1 and (request.options.pooling or emitted):
        raise ValidationError("n", "must be 1 for embeddings and for a request that goes on elsewhere")
    if emitted and not request.samples:
        raise ValidationError("emitted", "must be 0 for embeddings and with max_tokens 0: nothing is drawn")
    if emitted and params.max_tokens is not None and emitted >= params.max_tokens:
        raise ValidationError("emitted", f"{emitted} tokens are all that max_tokens {params.max_tokens} allows")


def _check_length(request: Request, info: RunnerInfo, config: EngineConfig) -> None:
    num_tokens, output = len(request.tokens), int(request.samples)  # what samples needs room for one token more
    room = " with room for one token of output" if output else ""
    capacity = _capacity(info)
    memory = "gpu_memory_utilization, kv_cache_memory_gib or num_gpu_blocks_override"
    limits = [
        (info.max_model_len - output, f"into max_model_len {info.max_model_len}{room}", "max_model_len"),
        (capacity - output, f"as the whole KV cache holds {capacity}{room}", memory),
    ]
    if not config.enable_chunked_prefill:
        limits.append((config.max_num_batched_tokens, "into one step, unchunked", "max_num_batched_tokens"))
    for most, where, setting in limits:
        if num_tokens > most:
            reason = f"{num_tokens} tokens, but at most {most} fit {where}; shorten the prompt or raise {setting}"
            raise ValidationError("prompt", reason)


def _capacity(info: RunnerInfo) -> int:
    """Tokens that the whole KV cache holds."""
    return (info.num_blocks - 1) * info.block_size


def _prompt(frame: TensorFrame, vocab_size: int) -> I32:
    if frame.dtype != "int32" or len(frame.shape) != 1:
        raise ValidationError("prompt", f"must be int32 [n], not {frame.dtype} {list(frame.shape)}")
    if not frame.shape[0]:
        raise ValidationError("prompt", "must hold at least one token")
    tokens = to_numpy(frame).copy()
    if int(tokens.view(np.uint32).max()) >= vocab_size:  # as those below 0 are, too
        low, high = int(tokens.min()), int(tokens.max())
        outside = low if low < 0 else high
        raise ValidationError("prompt", f"token id {outside} is outside the vocabulary of {vocab_size}")
    return tokens


def _embeds(frame: TensorFrame, num_tokens: int, hidden_size: int) -> F32:
    shape = (num_tokens, hidden_size)
    if frame.dtype not in ("float32", "bfloat16") or frame.shape != shape:
        found = f"{frame.dtype} {list(frame.shape)}"
        raise ValidationError("prompt_embeds", f"must be float32 or bfloat16 {list(shape)}, not {found}")
    embeds = to_numpy(frame).copy()
    if frame.dtype == "bfloat16":  # the upper half of a float32
        embeds = (embeds.astype(np.uint32) << 16).view(np.float32)
    if not np.isfinite(embeds).all():
        raise ValidationError("prompt_embeds", "must be finite")
    return embeds


def _seed(base: int | None, handle: int, tokens: I32) -> int:
    """Fresh entropy; with a base seed, a number that the same script gets again on its next run."""
    if base is None:
        return secrets.randbits(63)
    digest = hashlib.sha256(f"{base} {handle} ".encode())
    digest.update(tokens.data)
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def _hash_blocks(request: Request, block_size: int) -> None:
    keys: dict[str, bytes] = {}
    if request.options.cache_salt is not None:
        keys["salt"] = request.options.cache_salt.encode()
    if request.prompt_embeds is not None:
        keys["prompt_embeds"] = hashlib.sha256(request.prompt_embeds.data).digest()
    request.root = block_hash.root_key(keys) if keys else NO_KEYS
    block_hash.extend(request.hashes, request.root, request.tokens, block_size)
