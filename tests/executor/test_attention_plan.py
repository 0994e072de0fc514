"""What the executor says of how its kernels deal attention out: by hand, for an H200."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve.config.presets import load_model  # noqa: E402
from simserve.cost.dealing import AttentionPlan  # noqa: E402
from simserve.cost.profile_file import load_profile  # noqa: E402
from simserve.executor.real import attention_plan as executor_s  # noqa: E402
from simserve.executor.real.attention import AttentionPath  # noqa: E402
from simserve.types import ModelShape  # noqa: E402
from simserve_kernels import decode_workspace  # noqa: E402

NUM_SMS = 132
LLAMA = load_model("llama-3.1-8b")
PATH = AttentionPath("auto", "nhd", "varlen")
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (executor_s, decode_workspace):
        monkeypatch.setattr(module, "num_sms", lambda device: NUM_SMS)


def plan(
    model: ModelShape = LLAMA,
    path: AttentionPath = PATH,
    dtype: Any = BFLOAT16,
    kv_dtype: Any = BFLOAT16,
    max_model_len: int = 131_072,
) -> AttentionPlan | None:
    device = torch.device("cpu")
    found = executor_s.attention_plan(model, path, dtype, kv_dtype, max_model_len, device)
    return None if found is None else AttentionPlan(**found)


def test_it_is_that_of_the_profile_that_ships() -> None:
    assert plan() == plan(dtype=FLOAT16, kv_dtype=FLOAT16)
    assert plan() == load_profile("h200-llama-3.1-8b-simserve").attention_plan


@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": torch.float8_e4m3fn},
        {"dtype": FLOAT32, "kv_dtype": FLOAT32},
        {"path": PATH._replace(attention="v1")},
        {"path": PATH._replace(attention="v2")},
        {"path": PATH._replace(attention="article")},
        {"path": PATH._replace(mixed="split")},
        {"path": PATH._replace(num_draft_tokens=3)},
    ],
    ids=str,
)
def test_of_other_kernels_it_is_not_known(options: dict[str, Any]) -> None:
    assert plan(**options) is None


def test_short_models_and_packed_caches_have_one_tile_for_all_decodes() -> None:
    for tile, found in (
        (64, plan(max_model_len=8191)),
        (32, plan(path=PATH._replace(kv_layout="packed"))),
        (128, plan(replace(LLAMA, head_dim=64))),
        (32, plan(replace(LLAMA, head_dim=256))),
    ):
        assert found is not None
        assert found.few_decodes == found.many_decodes
        assert (found.many_decodes.tile, found.many_decodes.programs) == (tile, 4 * NUM_SMS)


def test_large_heads_have_tiles_of_their_own() -> None:
    found = plan(replace(LLAMA, head_dim=256))
    assert found is not None
    assert found.short == found.long
    assert found.long.tall.model_dump() == {"rows": 128, "keys": 64, "programs": NUM_SMS}
    assert found.long.whole.model_dump() == {"rows": 16, "keys": 32, "programs": 4 * NUM_SMS}


@pytest.mark.parametrize(("heads", "kv_heads"), [(71, 1), (128, 1), (15, 5), (32, 32), (48, 4)])
def test_as_many_chunks_run_at_a_time_as_the_kernel_plans_for(heads: int, kv_heads: int) -> None:
    """Of more than 64 query heads a KV head, a chunk takes more than one program."""
    found = plan(replace(LLAMA, num_attention_heads=heads, num_key_value_heads=kv_heads))
    grid = decode_workspace.split_grid(torch.device("cpu"), 1, heads, kv_heads, 4)
    assert found is not None
    assert found.few_decodes.programs // kv_heads == grid.budget
