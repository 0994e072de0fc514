"""Small random cases in the format of the recorded ones, made to hit every rule often."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["random_case"]


def random_case(seed: int) -> dict[str, Any]:
    """Config and workload; the same for the same seed."""
    r = random.Random(seed)
    config = _config(r)
    requests = _requests(r, config)
    workload: dict[str, Any] = {"requests": requests}
    last_s = max(q["t"] for q in requests)
    if r.random() < 0.3:
        workload["aborts"] = [
            [round(r.uniform(0, last_s + 0.1), 6), r.randrange(len(requests))]
            for _ in range(r.randint(1, 6))
        ]
    if r.random() < 0.15:
        workload["resets"] = [round(r.uniform(0, last_s + 0.3), 6) for _ in range(r.randint(1, 4))]
    return {"format": 1, "name": str(seed), "config": config, "workload": workload}


def _config(r: random.Random) -> dict[str, Any]:
    block_size = r.choice([1, 2, 4, 4, 8, 16])
    max_model_len = r.choice([24, 40, 64, 100, 200])
    kind = r.choice(["spec", "spec", "async", "async", "plain", "plain", "plain"])
    spec = None
    if kind == "spec":
        spec = {
            "method": r.choice(["ngram", "eagle"]),
            "num": r.randint(1, 5),
            "accept": [r.randint(0, 7), r.randint(0, 7)],
            "draft_len": [r.randint(0, 7), r.randint(0, 7)],
        }
    groups = _groups(r) if r.random() < 0.3 else None
    blocks_of_one = -(-max_model_len // block_size) * (len(groups) if groups else 1)
    chunked = r.random() > 0.15
    budget = r.choice([1, 2, 3, 5, 8, 16, 20, 33, 64, 128, 256])
    if not chunked:
        budget = max(budget, r.choice([max_model_len, max_model_len, max_model_len // 2]))
    return {
        "block_size": block_size,
        "num_gpu_blocks": 1 + max(3, int(blocks_of_one * r.choice([0.3, 0.7, 1, 1.2, 2, 4]))),
        "max_num_batched_tokens": budget,
        "max_num_seqs": r.choice([1, 2, 3, 4, 8, 32]),
        "max_model_len": max_model_len,
        "long_prefill_token_threshold": r.choice([0, 0, 0, 1, 2, 3, 7, 16]),
        "max_num_partial_prefills": r.choice([1] * 9 + [3]),
        "max_long_partial_prefills": 1,
        "enable_prefix_caching": r.random() < 0.8,
        "enable_chunked_prefill": chunked,
        "policy": r.choice(["fcfs", "priority"]),
        "hash_algo": "sha256",
        "async_scheduling": kind == "async",
        "spec": spec,
        "kv_groups": groups,
        "cost": [r.choice([0.005, 0.001]), 2e-05, 1e-08],
        "max_steps": r.choice([200, 400]),
        "record_blocks": True,
        "record_queue": True,
    }


def _groups(r: random.Random) -> list[dict[str, Any]]:
    full = {"type": "full"}
    sliding = {"type": "sliding", "window": r.choice([2, 3, 5, 8, 16, 17, 33, 64])}
    return r.choice(
        [
            [sliding],
            [full, sliding],
            [sliding, full],
            [full, sliding, sliding],
            [full, full, sliding],
        ]
    )


def _requests(r: random.Random, config: dict[str, Any]) -> list[dict[str, Any]]:
    max_model_len = config["max_model_len"]
    gap_s = r.choice([0.02, 0.005, 0.001, 0.1])
    mean_len = r.choice([5, 20, max_model_len * 0.6])
    now_s = 0.0
    requests: list[dict[str, Any]] = []
    for i in range(r.randint(2, 25)):
        # Equal arrivals under policy priority end the engine, so that there is always some gap.
        now_s = round(now_s + (1e-6 if r.random() < 0.2 else 1e-6 + r.expovariate(1 / gap_s)), 6)
        if config["policy"] == "fcfs" and r.random() < 0.2:
            now_s = requests[-1]["t"] if requests else 0.0
        longest = max_model_len - (r.random() > 0.02 or config["async_scheduling"])
        length = min(longest, 1 + int(r.expovariate(1 / mean_len)))
        entry: dict[str, Any] = {
            "id": i,
            "t": now_s,
            "prompt": _prompt(r, requests, length),
            "out": r.choice([1, 2, r.randint(1, 20), r.randint(1, 60)]),
        }
        if config["policy"] == "priority":
            entry["prio"] = r.randint(0, 3)
        if r.random() < 0.1:
            entry["salt"] = r.choice(["a", ""])
        if r.random() < 0.05:
            entry["plp"] = 1
        requests.append(entry)
    return requests


def _prompt(r: random.Random, earlier: list[dict[str, Any]], length: int) -> list[list[Any]]:
    """Shared segments, own segments, and earlier requests' prompts with some of their outputs."""
    parts: list[list[Any]] = []
    if earlier and r.random() < 0.3:
        before = r.choice(earlier)
        parts = [list(part) for part in before["prompt"]]
        parts.append(["o", before["id"], r.randint(1, before["out"])])
    left = length - sum(part[-1] for part in parts)
    while left > 0:
        count = r.choice([left, left, r.randint(1, left)])
        parts.append([r.choice([1000, 1001, 1002, 2000 + len(earlier)]), count])
        left -= count
    return _cut(parts, length)


def _cut(parts: list[list[Any]], length: int) -> list[list[Any]]:
    kept = []
    for part in parts:
        count = min(part[-1], length)
        if count:
            kept.append([*part[:-1], count])
        length -= count
    return kept
