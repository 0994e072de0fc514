"""Runs batches on the device: by replaying a graph where one fits, else call by call."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

import torch

from simserve.errors import CapacityError
from simserve.executor.real.attention import AttentionPath, BatchOnDevice
from simserve.executor.real.batch import Batch
from simserve.executor.real.compilations import Compilations
from simserve.executor.real.forward import Forward, TokenInputs
from simserve.executor.real.graphs import StepGraphs
from simserve.executor.real.marks import LayerMarks, Marks
from simserve.executor.real.step_inputs import StepInputs, StepShape
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


class _Launched(NamedTuple):
    """A batch that is under way."""

    prepared: float
    """When its inputs were."""
    is_new: bool
    """Whether its graph was captured for it."""


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
        return self.run_in_turn([batch])

    def run_in_turn(self, batches: Iterable[Batch]) -> StepTimes:
        """Run batches one behind the other, and wait for the end of the last one alone.

        What is prepared while the device is busy is no time of its own.

        Raises:
            CapacityError: as `run`.
        """
        began, compiled = perf_counter(), self._compilations.count
        self._step.rows.send()
        self._marks.restart()
        if self._step.outputs is not None:
            self._step.outputs.restart()
        launched = [self._launch(batch) for batch in batches]
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        ended = perf_counter()
        self._step.rows.staging.restart()
        times, marks, prepared = self._marks.seconds(), self._layer_marks, launched[0].prepared
        forward_s, sample_s = sum(times[0::3]), sum(times[1::3])
        return StepTimes(
            prepare_s=prepared - began,
            forward_s=forward_s,
            sample_s=sample_s,
            sync_s=ended - prepared - forward_s - sample_s,
            first_shape=self._compilations.count > compiled or any(one.is_new for one in launched),
            forward_parts=marks.parts(forward_s) if marks is not None else {},
        )

    def _launch(self, batch: Batch) -> _Launched:
        graphs = self._graphs
        key = graphs.keys.of(batch) if graphs is not None else None
        try:
            if graphs is None or key is None:
                inputs, on_device = self._send(batch)
                prepared = perf_counter()
                self._compute(inputs, on_device, len(batch.logit_rows))
                return _Launched(prepared, is_new=False)
            is_new = key not in graphs
            if is_new:
                graphs.capture(key)
            graphs.fill(batch, key)
            prepared = perf_counter()
            self._replay(graphs, key, len(batch.logit_rows))
            return _Launched(prepared, is_new)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.device} ran out of memory in a step of {len(batch.slots)} requests and "
                f"{batch.query_start_loc[-1]} tokens; lower kv_cache.gpu_memory_utilization (or "
                "num_gpu_blocks) or scheduler.max_num_batched_tokens, or end what else uses it"
            ) from error

    def _replay(self, graphs: StepGraphs, key: StepShape, num_logits: int) -> None:
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
        """Send a batch's arrays in one copy."""
        rows, path = self._step.rows, self._step.attention.path
        max_seq_len, max_query_len = int(batch.seq_lens.max()), int(batch.num_tokens.max())
        if path.sizes_by_length:
            max_seq_len = min(path.length_bound(max_seq_len), rows.longest)
        shape = StepShape(
            num_rows=len(batch.slots),
            num_tokens=int(batch.query_start_loc[-1]),
            num_logits=None if batch.num_wanted_each else len(batch.logit_rows),
            num_decodes=_num_decodes(batch, max_query_len, path),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        inputs = StepInputs(shape)
        piece = rows.staging.take(inputs.size)
        inputs.write(piece.numpy(), batch, rows)
        return inputs.read(rows.staging.send(piece), rows)


def _num_decodes(batch: Batch, max_query_len: int, path: AttentionPath) -> int:
    """Leading requests for the decode kernel, which takes one token each."""
    if max_query_len == 1:
        return len(batch.slots)
    if not path.reorders:
        return 0
    split = split_decodes_and_prefills(
        batch.query_start_loc, path.decode_threshold, path.require_uniform
    )
    return split.num_decodes if split.num_decode_tokens == split.num_decodes else 0
