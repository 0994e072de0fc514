"""Names to classes: built-ins (strings, so that listing imports nothing), plug-ins, user code.

A name is looked up as a built-in, then as an entry point of group `simserve.<group>`, then, if it
has the form `package.module:Class`, by import: also from the current directory, and from the folder
of the configuration.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from simserve.errors import PluginError, UnknownNameError, did_you_mean

__all__ = ["BUILTINS", "REQUIRED", "check_protocol", "is_builtin", "names", "resolve"]

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
        "can_hold_all",
        "cache_blocks",
        "uncommit",
        "free",
        "forget",
        "get_block_ids",
        "get_num_common_prefix_blocks",
        "decodes",
        "reset_prefix_cache",
    ),
    "evictions": (
        "__len__",
        "__iter__",
        "popleft_few",
        "popleft_n",
        "num_before",
        "append_n",
        "remove_n",
    ),
    "cost_models": ("price",),
}
"""Methods and properties that a class of each group must have (see protocols.py)."""


def names(group: str) -> list[str]:
    """All names of a group: built-ins, then installed entry points. Imports none of them."""
    found = list(BUILTINS[group])
    plugged_in = (entry_point.name for entry_point in entry_points(group=f"simserve.{group}"))
    return found + sorted(set(plugged_in) - set(found))


def is_builtin(group: str, name: str) -> bool:
    """Whether the project itself brings what goes by this name."""
    return name in BUILTINS[group]


def resolve(group: str, name: str, base_dir: Path | None = None) -> Any:
    """The class that `name` stands for.

    Args:
        group: what kind of class.
        name: built-in, of an entry point, or `module:Class`.
        base_dir: a folder in which modules are looked for, after all others.

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
        return _own(name, base_dir)
    return _imported(target)


def _own(name: str, base_dir: Path | None) -> Any:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        hint = f" (the file {module_name}.py without its folder)" if "/" in module_name else ""
        raise PluginError(
            f"'{name}' is not 'module:Class': give a module as it is imported{hint}, such as "
            "'my_module:MyClass'"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    beside = str((base_dir or Path()).resolve())
    if base_dir is not None and beside not in sys.path:
        sys.path.append(beside)
    return _imported(name)


def _imported(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        is_lacking = isinstance(error, ModuleNotFoundError) and error.name == module_name
        where = (
            "; modules are looked for in the current directory, beside the configuration, and "
            "where Python has its packages"
        )
        raise PluginError(f"cannot load '{target}': {error}{where * is_lacking}") from error


def check_protocol(cls: Any, group: str) -> None:
    """Raise PluginError if `cls` is no class, or naming every method it lacks for `group`."""
    if not isinstance(cls, type):
        name = getattr(cls, "__name__", type(cls).__name__)
        raise PluginError(f"'{name}' cannot serve among {group}: it is not a class")
    missing = [name for name in REQUIRED[group] if inspect.getattr_static(cls, name, cls) is cls]
    if missing:
        raise PluginError(
            f"{cls.__module__}:{cls.__qualname__} cannot serve among {group}: "
            f"it lacks {', '.join(missing)}"
        )
