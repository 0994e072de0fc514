"""The recorded cases, and worlds made from them."""

from __future__ import annotations

from pathlib import Path

from simserve.cost.formula import FormulaCost
from simserve.engine.inbox import Abort, Reset
from simserve.fidelity.conform import check
from simserve.fidelity.conform.cases import Case, case_requests, check_case_keys
from simserve.fidelity.logs.document import load_document
from tests.engine.rig import Log, World, build

__all__ = ["CASES", "load", "load_case", "world_of"]

CASES = sorted((Path(__file__).parents[1] / "data" / "golden").glob("*.json.gz"))


def load_case(path: Path) -> Case:
    return check_case_keys(path, load_document(path))


def load(name: str) -> Case:
    """The case whose name begins like that."""
    (path,) = [path for path in CASES if path.name.startswith(name)]
    return load_case(path)


def world_of(case: Case, leap: bool, log: Log | None = None) -> World:
    """A world like that of `conform`, but with a log in place of its record."""
    config, workload = case["config"], case["workload"]
    params = check._params(config)
    kv = check._kv_manager(config)
    return build(
        case_requests(case),
        num_gpu_blocks=config["num_gpu_blocks"],
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
        groups=kv.groups,
        drop_last_hit=bool(params.num_lookahead_tokens),
        cost=FormulaCost(*config["cost"]),
        drafter=check._drafter(config),
        aborts=[Abort(time_s, str(i)) for time_s, i in workload.get("aborts", ())],
        resets=[Reset(time_s) for time_s in workload.get("resets", ())],
        admit_as_engine=True,
        async_scheduling=config["async_scheduling"],
        leap=leap,
        max_steps=config["max_steps"],
        log=log,
        max_num_batched_tokens=params.max_num_batched_tokens,
        max_num_seqs=params.max_num_seqs,
        max_model_len=params.max_model_len,
        long_prefill_token_threshold=params.long_prefill_token_threshold,
        enable_chunked_prefill=params.enable_chunked_prefill,
        policy=params.policy,
        num_lookahead_tokens=params.num_lookahead_tokens,
    )
