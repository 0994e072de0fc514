"""The machines that the studies' cells run on, and how configurations are changed for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study_cells import CONFIGS, MACHINE, constant
from study_sitting import Sitting

from simserve.config.build_real import open_machine
from simserve.config.loader import LoadedConfig, load_config

if TYPE_CHECKING:
    from simserve.executor.real.machine import Machine

OPENING_S = 25.0
"""A machine is not opened with less time left."""
STEP_CASES = (
    "1@512",
    "1@2048",
    "1@8000",
    "1@30000",
    "32*1@512",
    "32*1@2048",
    "32*1@8000",
)
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
"""The model of a rehearsal."""


class Settings:
    """How configurations are changed: to run for real, and in a rehearsal to be short."""

    def __init__(self, rehearsal: Path | None) -> None:
        self.is_rehearsal = rehearsal is not None
        self.device = "cpu" if rehearsal else "cuda"
        self.step_cases = STEP_CASES[:1] if rehearsal else STEP_CASES
        self._rehearsal = rehearsal

    @property
    def executor(self) -> list[str]:
        """Overrides of every configuration."""
        if self._rehearsal is None:
            return ["executor={kind: real, device: cuda}"]
        model = f"model={{config: {self._rehearsal}}}"
        return ["executor={kind: real, device: cpu, dtype: float32}", model]

    def of(self, config: str) -> list[str]:
        """Overrides of a configuration of configs/studies."""
        if not self.is_rehearsal:
            return self.executor
        text = (CONFIGS / f"{config}.yaml").read_text(encoding="utf-8")
        if "trace:" in text:
            return [*self.executor, "workload.trace.prompt_len_multiplier=0.01"]
        return [*self.executor, constant("prompt_len", 20), constant("output_len", 4)]

    def machine(self, changes: Mapping[str, Any] = MACHINE) -> LoadedConfig:
        """The configuration of a machine: `MACHINE` with some limits changed."""
        settings = [f"{key}={value}" for key, value in {**MACHINE, **changes}.items()]
        one = {"num_requests": 1, "output_len": {"kind": "constant", "value": 1}}
        source = {"model": "llama-3.1-8b", "gpu": "h200", "workload": {"synthetic": one}}
        return load_config(source, [*self.executor, *settings])


@contextmanager
def machine(sitting: Sitting, loaded: LoadedConfig, name: str) -> Iterator[Machine | None]:
    """An open machine; None if it could not be opened, which is recorded."""
    found: list[Machine] = []

    def opening() -> dict[str, Any]:
        found.append(open_machine(loaded))
        facts = {k: v for k, v in found[0].facts.items() if isinstance(v, str | int | float | bool)}
        scheduler = loaded.config.scheduler
        return facts | {
            "block_size": loaded.config.kv_cache.block_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_model_len": scheduler.max_model_len,
        }

    sitting.report["machines"].pop(name, None)  # of a sitting before: it is opened again
    sitting.measure("machines", name, opening, OPENING_S)
    try:
        yield found[0] if found else None
    finally:
        if found:
            found.pop().close()
        gc.collect()
