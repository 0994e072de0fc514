"""A model on a device, ready to run plans: weights, KV cache, rows, graphs, all warmed up."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from simserve.errors import ConfigError, Problem
from simserve.executor.real.attention import AttentionPath, PagedAttention, WithoutRope
from simserve.executor.real.choices import SamplingChoice, SamplingChoices
from simserve.executor.real.decoder_shape import DecoderShape
from simserve.executor.real.draft_model import DraftModel, DraftSource
from simserve.executor.real.forward import Forward
from simserve.executor.real.graph_keys import GraphKeys
from simserve.executor.real.graphs import StepGraphs
from simserve.executor.real.kernels import Kernels, reference_kernels, triton_kernels
from simserve.executor.real.kv_cache import allocate_caches, bytes_per_block, kv_dtype
from simserve.executor.real.memory import blocks_that_fit, measure
from simserve.executor.real.model import Decoder
from simserve.executor.real.outcomes import StepOutputs
from simserve.executor.real.request_rows import RequestRows
from simserve.executor.real.runner import ModelRunner
from simserve.executor.real.sampler import Sampler
from simserve.executor.real.staging import Staging
from simserve.executor.real.warm_up import Limits, largest_batch, warm_up_batches
from simserve.executor.real.weights import load_decoder, torch_dtype
from simserve.sampling import RequestSampling
from simserve.types import ModelShape

__all__ = ["Machine", "MachineOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """What a machine is made for."""

    device: Literal["cuda", "cpu"]
    path: AttentionPath
    replays: bool
    """Requests go on with the tokens that the trace dictates, not with those chosen."""
    dtype: str
    """Of weights and activations: bfloat16, float16, float32; on a CPU float64 too."""
    kv_dtype: str
    block_size: int
    num_gpu_blocks: int | None
    """The null block included; None: what fits."""
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    weights: str | Path = "random"
    draft: DraftSource | None = None
    """A model that proposes drafts, with random weights of the same seed."""
    seed: int = 0
    breakdown: bool = False
    sampling: tuple[SamplingChoice, ...] = ()
    """How tokens are drawn; of none the likeliest are taken."""
    own_sampling: tuple[Mapping[str, Any], ...] = ()
    """What single requests may say for themselves, over their choice."""
    max_logprobs: int | None = None
    """Of how many of the likeliest tokens a request may want log-probabilities; None: no request
    wants any."""


class Machine:
    """Loads the models, sizes and allocates their KV caches, compiles and captures beforehand.

    Raises:
        ConfigError: there is no such device, or a dtype that it does not compute in.
        CapacityError: weights or KV cache do not fit.
    """

    def __init__(
        self, shape: DecoderShape, options: MachineOptions, kernels: Kernels | None = None
    ) -> None:
        self._options = options
        self.path = options.path
        self.replays = options.replays
        self.vocab_size = shape.model.vocab_size
        self.eos_token_ids = shape.eos_token_ids
        self._device = device = _device(options.device)
        self._kv_dtype = kv_dtype(options.kv_dtype, torch_dtype(options.dtype))
        on_gpu = device.type == "cuda"
        if on_gpu:
            for one in (shape, *([options.draft.shape] if options.draft else [])):
                _check_kernels(one.model, options.block_size)
            torch.cuda.reset_peak_memory_stats(device)
        self._kernels = kernels or (triton_kernels() if on_gpu else reference_kernels())
        self.decoder = self._load(shape, options.weights)
        draft_decoder = self._load_draft(options.draft) if options.draft else None
        self.rows = RequestRows(
            options.max_num_seqs, options.max_model_len, options.block_size, Staging(device)
        )
        self.choices = SamplingChoices(options.sampling, options.seed)
        self.knows_own_sampling = bool(options.own_sampling)
        possible = _possible(options)
        self.sampler = (
            Sampler(possible, self.rows, self.vocab_size, len(self.eos_token_ids))
            if possible
            else None
        )
        self.outputs = (
            None
            if options.replays
            else StepOutputs(
                options.max_num_seqs * options.path.decode_threshold, options.max_logprobs, device
            )
        )
        """The chosen tokens of the last step; None: the trace dictates them."""
        self.num_gpu_blocks = self._num_blocks(draft_decoder)
        self.forward = step = self._step(self.num_gpu_blocks)
        self.caches = step.attention.caches
        """K and V of each layer."""
        self.runner = self._warm_runner(step, _limits(options))
        self.draft = self._draft_model(draft_decoder) if draft_decoder else None

    @property
    def facts(self) -> dict[str, Any]:
        """What is worth noting of a run on it. Memory is that of its peak so far."""
        options, path = self._options, self.path
        facts: dict[str, Any] = {
            "device": options.device,
            "attention": path.attention,
            "kv_layout": path.kv_layout,
            "mixed": path.mixed,
            "decode_threshold": path.decode_threshold,
            "require_uniform": path.require_uniform,
            "dtype": options.dtype,
            "kv_dtype": str(self._kv_dtype).removeprefix("torch."),
            "num_gpu_blocks": self.num_gpu_blocks,
            "torch": torch.__version__,
        }
        if self._device.type == "cuda":
            import triton

            from simserve.executor.real.attention_plan import attention_plan

            free, total = torch.cuda.mem_get_info(self._device)
            peak = torch.cuda.max_memory_reserved(self._device)
            given_back = peak - torch.cuda.memory_reserved(self._device)
            facts |= {
                "attention_plan": attention_plan(
                    self.decoder.shape.model,
                    path,
                    self.decoder.dtype,
                    self._kv_dtype,
                    options.max_model_len,
                    self._device,
                ),
                "device_name": torch.cuda.get_device_name(self._device),
                "triton": triton.__version__,
                "cuda": torch.version.cuda,
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
                "peak_reserved_bytes": peak,
                "gpu_used_bytes": total - free + given_back,
                "gpu_memory_bytes": total,
            }
        return facts

    def _load(self, shape: DecoderShape, weights: str | Path) -> Decoder:
        options = self._options
        decoder = load_decoder(
            shape,
            weights=weights,
            seed=options.seed,
            dtype=torch_dtype(options.dtype),
            device=self._device,
            max_position=options.max_model_len + self.path.decode_threshold,
        )
        if self._kernels.rope_kv_write is not None:
            decoder.ops = WithoutRope(decoder.ops)
        return decoder

    def _load_draft(self, draft: DraftSource) -> Decoder:
        """As `_load`; what is wrong with a folder of weights stands at another key."""
        try:
            return self._load(*draft)
        except ConfigError as error:
            key = "executor.draft_weights"
            problems = [replace(one, path=one.path or key) for one in error.problems]
            raise ConfigError(problems) from None

    def _num_blocks(self, draft: Decoder | None) -> int:
        """The pool's size: as given, or what is left when a step of the largest size has run."""
        options = self._options
        if options.num_gpu_blocks is not None:
            return options.num_gpu_blocks
        if self._device.type != "cuda":
            message = "must be given with executor.device cpu: there is no GPU memory to divide"
            raise ConfigError([Problem(path="kv_cache.num_gpu_blocks", message=message)])
        steps = [(self._step(num_blocks=1), _limits(options))]
        if draft is not None:
            steps.append((self._draft_step(draft, num_blocks=1), _draft_limits(options)))
        with self.rows.in_block_0():
            for step, limits in steps:
                ModelRunner(step, None, breakdown=False).run(largest_batch(limits))
        block_bytes = sum(
            bytes_per_block(step.decoder.shape.model, options.block_size, self._kv_dtype)
            for step, _ in steps
        )
        del steps, step
        use = measure(self._device)
        return blocks_that_fit(use, block_bytes, options.gpu_memory_utilization)

    def _step(self, num_blocks: int) -> Forward:
        attention = self._attention(self.decoder, self.path, num_blocks)
        return Forward(self.decoder, attention, self.rows, self.outputs, self.sampler)

    def _draft_step(self, decoder: Decoder, num_blocks: int) -> Forward:
        """The likeliest token of each request; attention is one call, however many tokens."""
        path = self.path._replace(mixed="varlen", num_draft_tokens=0)
        most, k = self._options.max_num_seqs, self.path.num_draft_tokens
        outputs = StepOutputs(most, None, self._device, num_passes=k)
        attention = self._attention(decoder, path, num_blocks)
        return Forward(decoder, attention, self.rows, outputs)

    def _attention(self, decoder: Decoder, path: AttentionPath, num_blocks: int) -> PagedAttention:
        model, block_size = decoder.shape.model, self._options.block_size
        caches = allocate_caches(
            model, num_blocks, block_size, path.kv_layout, self._kv_dtype, self._device
        )
        table = decoder.table if self._kernels.rope_kv_write is not None else None
        return PagedAttention(caches, path, self._kernels, model.sliding_window, table)

    def _draft_model(self, decoder: Decoder) -> DraftModel:
        step = self._draft_step(decoder, self.num_gpu_blocks)
        return DraftModel(step, self._warm_runner(step, _draft_limits(self._options)))

    def _warm_runner(self, step: Forward, limits: Limits) -> ModelRunner:
        breakdown = self._options.breakdown and step is self.forward
        if self._device.type != "cuda":
            return ModelRunner(step, None, breakdown)
        path = step.attention.path
        keys = GraphKeys(
            limits.max_num_seqs, limits.max_num_batched_tokens, self.rows.longest, path
        )
        graphs = StepGraphs(step, keys, breakdown)
        # Without graphs: batches of the same kinds, but larger ones, are launched one by one. What
        # has to be compiled or loaded for them, one layer asks for.
        eager = ModelRunner(step.first_layer(), None, breakdown=False)
        with self.rows.in_block_0():
            for batch in warm_up_batches(limits, path):
                eager.run(batch)
        graphs.warm_up()
        return ModelRunner(step, graphs, breakdown)

    def close(self) -> None:
        """Give the device's memory back; nothing can be run afterwards."""
        del self.runner, self.forward, self.caches, self.decoder, self.draft, self.rows
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _limits(options: MachineOptions) -> Limits:
    return Limits(options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len)


def _draft_limits(options: MachineOptions) -> Limits:
    """A draft model's step has a token more of each request that is to get drafts."""
    limits = _limits(options)
    return limits._replace(
        max_num_batched_tokens=limits.max_num_batched_tokens + limits.max_num_seqs
    )


def _possible(options: MachineOptions) -> list[RequestSampling]:
    """All settings that a request may have; none: the likeliest tokens are taken."""
    choices = [one.sampling for one in options.sampling]
    if not options.own_sampling:
        return choices
    bases = choices or [RequestSampling(temperature=0.0)]
    return bases + [replace(base, **own) for base in bases for own in options.own_sampling]


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        message = (
            "torch sees no CUDA GPU here; run on a machine with one and a torch built for CUDA, or "
            "set it to cpu (slow references, for small models)"
        )
        raise ConfigError([Problem(path="executor.device", message=message)])
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _check_kernels(model: ModelShape, block_size: int) -> None:
    """Refuse what the Triton kernels are not written for."""
    from simserve_kernels.checks import BLOCK_SIZES, HEAD_SIZES

    problems = []
    if model.head_dim not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        message = f"{model.name} has heads of {model.head_dim}; the GPU kernels know {sizes}"
        problems.append(Problem(path="model", message=message))
    if block_size not in BLOCK_SIZES:
        message = f"the GPU kernels know {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}, not {block_size}"
        problems.append(Problem(path="kv_cache.block_size", message=message))
    if problems:
        raise ConfigError(problems)
