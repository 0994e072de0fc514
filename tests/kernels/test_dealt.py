"""What a cost model says of chunks and tiles is what the kernels make of them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from simserve.config.presets import load_model  # noqa: E402
from simserve.cost.dealing import Dealer, SplitDecodes, _cut  # noqa: E402
from simserve.cost.profile_file import load_profile  # noqa: E402
from simserve_kernels.attention_tile import Options, _find_tile  # noqa: E402
from simserve_kernels.decode_plan import PlanOptions, plan_chunks  # noqa: E402

FINE_TOKENS = 512


@triton.jit
def chunks_kernel(out, seq_lens, num_seqs, plan: tl.constexpr):
    seq, chunks, tiles = plan_chunks(seq_lens, num_seqs, plan)
    tl.store(out + 2 * seq, chunks, mask=seq < num_seqs)
    tl.store(out + 2 * seq + 1, tiles, mask=seq < num_seqs)


@triton.jit
def tiles_kernel(out, query_start, num_seqs, opt: tl.constexpr):
    seq, tile = _find_tile(query_start, num_seqs, opt)
    tl.store(out + 2 * tl.program_id(1), seq)
    tl.store(out + 2 * tl.program_id(1) + 1, tile)


def planned(device: str, contexts: list[int], tile: int, budget: int) -> list[int]:
    """The chunks that the decode kernel cuts contexts into (tokens), in its order."""
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    out = torch.zeros(len(contexts), 2, dtype=torch.int32, device=device)
    plan = PlanOptions(
        budget=budget,
        window=-1,
        tile=tile,
        fine_tiles=triton.cdiv(FINE_TOKENS, tile),
        seqs_pad=triton.next_power_of_2(len(contexts)),
    )
    chunks_kernel[(1,)](out, lengths, len(contexts), plan)
    return [
        min(size * tile, context - part * size * tile)
        for context, (chunks, size) in zip(contexts, out.tolist(), strict=True)
        for part in range(chunks)
    ]


def test_chunks_are_those_of_the_decode_kernel(device: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_cut = 0
    for case in range(60):
        number, spread = int(rng.integers(1, 2 + 4 * case)), rng.uniform(0.0, 2.5)
        lengths = rng.lognormal(rng.uniform(1.0, 9.0), spread, number)
        contexts = [min(int(one) + 1, 200_000) for one in lengths]
        tile, slots = int(rng.choice([16, 32, 64, 128])), int(rng.integers(1, 300))
        split = SplitDecodes(tile=tile, programs=slots, fine_tokens=FINE_TOKENS)
        chunks = _cut(contexts, split, slots)
        assert chunks == planned(device, contexts, tile, slots), (contexts, tile, slots)
        num_cut += len(chunks) > number
    assert 10 < num_cut < 60


def test_tiles_are_those_of_the_prefill_kernel(device: str, seed: int) -> None:
    """The kernel begins with the last tile; of sequences that fit one tile, with the first one."""
    profile = load_profile("h200-llama-3.1-8b-simserve")
    assert profile.attention_plan is not None
    model, kind = load_model("llama-3.1-8b"), profile.attention_plan.short.tall
    dealer, rng, group = Dealer(profile.attention_plan, model), np.random.default_rng(seed), 4
    for number in (1, 2, 5, 17):
        lengths = [int(one) for one in rng.integers(1, 90, number)]
        order, keys = [], {}
        for seq, n in enumerate(lengths):
            for tile, taken in enumerate(dealer._tiles(0, n, kind)):
                order.append((seq, tile))
                keys[seq, tile] = taken
        begins = [0, *np.cumsum(lengths).tolist()]
        whole = launched(device, begins, group, kind.rows, one_tile=True)
        assert [seq for seq, _ in whole] == list(range(number))
        found = launched(device, begins, group, kind.rows, one_tile=False)
        real = [(seq, tile) for seq, tile in found if tile * kind.rows < lengths[seq] * group]
        assert real == order[::-1]
        for seq, tile in order:
            last_row = min((tile + 1) * kind.rows, lengths[seq] * group) - 1
            assert 0 <= keys[seq, tile] - (last_row // group + 1) < kind.keys


def launched(device, begins, group, block_m, *, one_tile) -> list[tuple[int, int]]:
    """(Sequence, tile) of each program of a launch, in the order in which they begin."""
    num_seqs = len(begins) - 1
    fields = dict.fromkeys(Options._fields, 0)
    seqs_pad = max(16, triton.next_power_of_2(num_seqs))
    fields |= {"group": group, "block_m": block_m, "seqs_pad": seqs_pad, "one_tile": one_tile}
    opt = Options(**fields)
    num_tiles = num_seqs + (0 if one_tile else begins[-1] * group // block_m)
    out = torch.zeros(num_tiles, 2, dtype=torch.int32, device=device)
    starts = torch.tensor(begins, dtype=torch.int32, device=device)
    tiles_kernel[(1, num_tiles)](out, starts, num_seqs, opt)
    return [tuple(pair) for pair in out.tolist()]
