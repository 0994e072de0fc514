"""Names to classes: built-ins (strings, so that listing imports nothing), plug-ins, user code.

A name is looked up as a built-in, then as an entry point of group `simserve.<group>`, then, if it
has the form `package.module:Class`, by import (the current directory is on the path).
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from simserve.errors import PluginError, UnknownNameError, did_you_mean

__all__ = ["BUILTINS", "REQUIRED", "check_protocol", "names", "resolve"]

BUILTINS: dict[str, dict[str, str]] = {
    "schedulers": {
        "vllm": "simserve.sched.vllm:VllmScheduler",
        "fcfs_static": "simserve.sched.fcfs_static:FcfsStaticScheduler",
        "prefill_first": "simserve.sched.prefill_first:PrefillFirstScheduler",
        "sarathi": "simserve.sched.sarathi:SarathiScheduler",
        "sjf": "simserve.sched.sjf:SjfScheduler",
    },
    "allocators": {
        "paged": "simserve.kv.manager:PagedKVCacheManager",
        "contiguous": "simserve.kv.contiguous:ContiguousKVCacheManager",
    },
    "evictions": {
        "lru": "simserve.kv.free_queue:FreeQueue",
        "fifo": "simserve.kv.eviction_fifo:FifoFreeQueue",
    },
    "cost_models": {
        "formula": "simserve.cost.formula:FormulaCost",
        "roofline": "simserve.cost.roofline:RooflineCost",
        "profile": "simserve.cost.profile:ProfileCost",
    },
    "readers": {
        "simserve": "simserve.workload.readers.native:NativeReader",
        "mooncake": "simserve.workload.readers.mooncake:MooncakeReader",
        "bailian": "simserve.workload.readers.bailian:BailianReader",
        "azure": "simserve.workload.readers.azure:AzureReader",
        "burstgpt": "simserve.workload.readers.burstgpt:BurstGptReader",
        "timed_trace": "simserve.workload.readers.timed_trace:TimedTraceReader",
        "custom": "simserve.workload.readers.custom:CustomReader",
        "vidur": "simserve.workload.readers.vidur:VidurReader",
        "llmservingsim": "simserve.workload.readers.llmservingsim:LlmServingSimReader",
        "dynamo": "simserve.workload.readers.dynamo:DynamoReader",
        "servegen": "simserve.workload.readers.servegen:ServeGenReader",
    },
}

REQUIRED: dict[str, tuple[str, ...]] = {
    "schedulers": (
        "num_running",
        "num_waiting",
        "unfinished",
        "add_request",
        "abort",
        "schedule",
        "update",
    ),
    "allocators": (
        "num_free_blocks",
        "evicted_cached_blocks",
        "get_computed_blocks",
        "allocate_slots",
        "can_hold",
        "cache_blocks",
        "free",
        "forget",
        "get_block_ids",
        "get_num_common_prefix_blocks",
        "decodes",
        "reset_prefix_cache",
    ),
    "cost_models": ("price",),
}
"""Methods and properties that a class of each group must have (see protocols.py)."""


def names(group: str) -> list[str]:
    """All names of a group: built-ins, then installed entry points. Imports none of them."""
    found = list(BUILTINS[group])
    plugged_in = (entry_point.name for entry_point in entry_points(group=f"simserve.{group}"))
    return found + sorted(set(plugged_in) - set(found))


def resolve(group: str, name: str) -> Any:
    """The class that `name` stands for.

    Raises:
        UnknownNameError: no such name; the message lists what there is.
        PluginError: a `module:Class` cannot be imported.
    """
    target = BUILTINS[group].get(name)
    if target is None:
        for entry_point in entry_points(group=f"simserve.{group}"):
            if entry_point.name == name:
                return entry_point.load()
        if ":" not in name:
            known = names(group)
            raise UnknownNameError(
                f"no {group[:-1].replace('_', ' ')} is called '{name}'{did_you_mean(name, known)}; "
                f"there are {', '.join(known)}, or your own as 'module:Class'"
            )
        target = name
    module_name, _, attribute = target.partition(":")
    if "" not in sys.path and target == name:
        sys.path.insert(0, "")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(f"cannot load '{target}': {error}") from error


def check_protocol(cls: type, group: str) -> None:
    """Raise PluginError naming every method that `cls` lacks to serve in `group`."""
    missing = [name for name in REQUIRED[group] if inspect.getattr_static(cls, name, cls) is cls]
    if missing:
        raise PluginError(
            f"{cls.__module__}:{cls.__qualname__} cannot serve among {group}: "
            f"it lacks {', '.join(missing)}"
        )
