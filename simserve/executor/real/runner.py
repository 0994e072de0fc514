"""Runs batches on the device: by replaying a graph where one fits, else call by call."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch

from simserve.errors import CapacityError
from simserve.executor.real.attention import BatchOnDevice
from simserve.executor.real.batch import Batch
from simserve.executor.real.compilations import Compilations
from simserve.executor.real.forward import Forward, TokenInputs
from simserve.executor.real.graph_keys import GraphKey
from simserve.executor.real.graphs import StepGraphs
from simserve.executor.real.marks import LayerMarks, Marks
from simserve.kv.batch import split_decodes_and_prefills

__all__ = ["ModelRunner", "StepTimes"]


class StepTimes(NamedTuple):
    """Where the wall time of a step went; the seconds add up to it."""

    prepare_s: float
    """Until the inputs are on their way to the device."""
    forward_s: float
    """The model, on the device's clock."""
    sample_s: float
    """The choice of the next tokens, on the device's clock."""
    sync_s: float
    """What is left: launches, and the host's wait for the end."""
    first_shape: bool
    """Whether something was compiled or captured, for which the other times are too long."""
    forward_parts: dict[str, float]
    """Seconds of the forward pass by part, if it is broken down."""
    draft_s: float = 0.0
    """A draft model's passes, on the device's clock."""


class ModelRunner:
    """Launches steps and takes their times.

    Args:
        step: what is run.
        graphs: captured steps; None: there are none.
        breakdown: take times inside the forward pass.
    """

    def __init__(self, step: Forward, graphs: StepGraphs | None, breakdown: bool) -> None:
        self.device = step.rows.ids.device
        self._step = step
        self._staging = step.rows.staging
        self._graphs = graphs
        self._marks = Marks(self.device)
        self._eager_marks = LayerMarks(self.device) if breakdown else None
        self._layer_marks: LayerMarks | None = None
        self._compilations = Compilations()

    def run(self, batch: Batch) -> StepTimes:
        """Run a batch to its end.

        Raises:
            CapacityError: it takes more memory than the GPU has left.
        """
        try:
            return self._run(batch)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.device} ran out of memory in a step of {len(batch.slots)} requests and "
                f"{batch.query_start_loc[-1]} tokens; lower kv_cache.gpu_memory_utilization (or "
                "num_gpu_blocks) or scheduler.max_num_batched_tokens, or end what else uses it"
            ) from error

    def _run(self, batch: Batch) -> StepTimes:
        began, compiled = perf_counter(), self._compilations.count
        graphs = self._graphs
        key = graphs.keys.of(batch) if graphs is not None else None
        is_new = False
        self._marks.restart()
        if graphs is not None and key is not None:
            is_new = key not in graphs
            if is_new:
                graphs.capture(key)
            graphs.fill(batch, key)
            prepared = perf_counter()
            self._replay(graphs, key, len(batch.logit_rows))
        else:
            inputs, on_device = self._send(batch)
            prepared = perf_counter()
            self._compute(inputs, on_device, len(batch.logit_rows))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        ended = perf_counter()
        self._staging.restart()
        forward_s, sample_s = self._marks.seconds()
        marks = self._layer_marks
        return StepTimes(
            prepare_s=prepared - began,
            forward_s=forward_s,
            sample_s=sample_s,
            sync_s=ended - prepared - forward_s - sample_s,
            first_shape=is_new or self._compilations.count > compiled,
            forward_parts=marks.parts(forward_s) if marks is not None else {},
        )

    def _replay(self, graphs: StepGraphs, key: GraphKey, num_logits: int) -> None:
        self._marks.take()
        graphs.forward(key)
        self._marks.take()
        self._layer_marks = graphs.sample(key)
        self._send_outputs(num_logits)
        self._marks.take()

    def _compute(self, inputs: TokenInputs, batch: BatchOnDevice, num_logits: int) -> None:
        self._layer_marks = marks = self._eager_marks
        if marks is not None:
            marks.restart()
        self._marks.take()
        logits = self._step.logits(inputs, batch, marks)
        self._marks.take()
        self._step.sample(inputs, logits)
        self._send_outputs(num_logits)
        self._marks.take()

    def _send_outputs(self, num_logits: int) -> None:
        if self._step.outputs is not None:
            self._step.outputs.send(num_logits)

    def _send(self, batch: Batch) -> tuple[TokenInputs, BatchOnDevice]:
        """Send a batch's arrays in one copy, and derive on the device what follows from them."""
        token_rows, positions, *logits, slots, seq_lens, query_start_loc = self._staging.send(
            batch.token_slots(),
            batch.positions(),
            batch.logit_rows,
            batch.logit_slots,
            batch.logit_ends,
            batch.slots,
            batch.seq_lens,
            batch.query_start_loc,
        )
        rows = self._step.rows
        max_seq_len, max_query_len = int(batch.seq_lens.max()), int(batch.num_tokens.max())
        if self._step.attention.path.sizes_by_length:
            bound = self._step.attention.path.length_bound(max_seq_len)
            max_seq_len = min(bound, rows.longest)
        on_device = BatchOnDevice(
            positions=positions,
            slot_mapping=rows.slots(token_rows, positions),
            # All columns: kernels are compiled for the distance of two rows.
            block_table=rows.tables.index_select(0, slots),
            seq_lens=seq_lens.int(),
            query_start_loc=query_start_loc.int(),
            num_decodes=self._num_decodes(batch, max_query_len),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        return TokenInputs(token_rows, positions, *logits), on_device

    def _num_decodes(self, batch: Batch, max_query_len: int) -> int:
        """Leading requests for the decode kernel, which takes one token each."""
        path = self._step.attention.path
        if max_query_len > 1 and not path.reorders:
            return 0
        split = split_decodes_and_prefills(
            batch.query_start_loc, path.decode_threshold, path.require_uniform
        )
        return split.num_decodes if split.num_decode_tokens == split.num_decodes else 0
