"""What `simserve bench kernels` can measure: every case by name. Needs no torch.

decode b64 ctx2048             64 sequences, one query each over 2,048 tokens
decode b64 ctx2048 page64      the same with blocks of 64 tokens; 16 unless named
fp8 KV decode b64 ctx2048      K and V in float8 e4m3
prefill 8192                   one prompt; `prefill 16 x 512`: sixteen
chunk 2048 @ 30720             2,048 queries after 30,720 computed tokens
mixed 64 x ctx2048 + 1984 chunk @8192
verify 64 x ctx2048 k3         three drafts each: four queries over 2,048 tokens
kv_write 2048                  K and V of 2,048 tokens into the cache
dense 8192 d128 bfloat16       contiguous K and V; `dense 1 @ 8191 …`: the last row only
sample top_p b64               a token for each of 64 rows of logits; all of them in `sample_cases`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from random import Random  # noqa: TID251 - the ragged lengths are defined by this generator

from simserve.errors import SimserveError, did_you_mean
from simserve.executor.real.bench.sample_cases import SAMPLE_WAYS, SampleCase, sample_cases

__all__ = [
    "CASES",
    "DEFAULT_WAYS",
    "WAYS",
    "AttentionCase",
    "Case",
    "DenseCase",
    "Heads",
    "WriteCase",
    "choose_cases",
    "choose_ways",
]

_ATTENTION_WAYS = ("auto", "v1", "v2", "article", "varlen", "split", "flash", "naive")
WAYS = (*_ATTENTION_WAYS, "kv_write", *SAMPLE_WAYS)
DEFAULT_WAYS = tuple(way for way in WAYS if way != "article")  # it is v1 or v2, by a rule
_LARGE_KV_BYTES = 3e9
_OTHER_BLOCK_SIZES = (
    (64, 2048, 32),
    (64, 2048, 64),
    (64, 2048, 128),
    (1, 32768, 64),
    (8, 8192, 64),
    (256, 2048, 64),
)
"""Batch, context and block size."""
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one layer. The default is that of Llama 3 8B."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.num_kv_heads * self.head_size * _DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Attention over the paged cache."""

    name: str
    seqs: tuple[tuple[int, int], ...]
    """(queries, tokens) of each sequence; the queries are the last of its tokens."""
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    heads: Heads = Heads()

    @property
    def ways(self) -> tuple[str, ...]:
        """How it can be computed."""
        decodes = [num_queries == 1 for num_queries, _ in self.seqs]
        if all(decodes):
            return "auto", "v1", "v2", "article"
        return ("varlen", "split") if any(decodes) else ("varlen",)

    @property
    def num_bytes(self) -> int:
        """K and V, read once."""
        return sum(tokens for _, tokens in self.seqs) * self.heads.kv_bytes(self.kv_dtype)

    @property
    def flops(self) -> int:
        """Four per head dimension for each pair of a query head and a key that it sees."""
        pairs = sum(n * tokens - n * (n - 1) // 2 for n, tokens in self.seqs)
        return 4 * self.heads.num_heads * self.heads.head_size * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCase:
    """New K and V into the paged cache."""

    name: str
    num_tokens: int
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    heads: Heads = Heads()
    flops: None = None

    @property
    def ways(self) -> tuple[str, ...]:
        """There is one."""
        return ("kv_write",)

    @property
    def num_bytes(self) -> int:
        """K and V, read and written."""
        return 2 * self.num_tokens * self.heads.kv_bytes(self.kv_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCase:
    """Attention over contiguous K and V, with and without the score matrix in memory.

    Its bytes and FLOPs are counted by the kernels' own `traffic`.
    """

    name: str
    num_queries: int
    num_tokens: int
    dtype: str = "bfloat16"
    heads: Heads = Heads()

    @property
    def ways(self) -> tuple[str, ...]:
        """Without and with the score matrix."""
        return "flash", "naive"


Case = AttentionCase | WriteCase | DenseCase | SampleCase


def _decodes() -> Iterator[AttentionCase]:
    for batch, context in product((1, 8, 32, 64, 128, 256), (512, 2048, 8192, 32768)):
        yield _decode(f"decode b{batch} ctx{context}", [context] * batch)
    yield _decode("decode b64 ragged mean 1507 max 11703", _ragged(7, 64))
    yield _decode("decode b256 ragged mean 1924 max 19786", _ragged(7, 256))
    yield _decode("decode b64: 63 x ctx512 + 1 x ctx32768", [512] * 63 + [32768])
    for batch, context, block_size in _OTHER_BLOCK_SIZES:
        name = f"decode b{batch} ctx{context} page{block_size}"
        yield _decode(name, [context] * batch, block_size=block_size)
    for batch, context in product((8, 64), (2048, 8192)):
        name = f"fp8 KV decode b{batch} ctx{context}"
        yield _decode(name, [context] * batch, kv_dtype="float8_e4m3fn")


def _decode(
    name: str, lengths: Iterable[int], *, kv_dtype: str = "bfloat16", block_size: int = 16
) -> AttentionCase:
    seqs = tuple((1, length) for length in lengths)
    return AttentionCase(name=name, seqs=seqs, kv_dtype=kv_dtype, block_size=block_size)


def _ragged(seed: int, batch: int) -> list[int]:
    generator = Random(seed)
    draws = (generator.lognormvariate(0, 1) for _ in range(batch))
    return [max(16, min(32768, int(draw * 2048 / 1.6487))) for draw in draws]


def _prefills() -> Iterator[AttentionCase]:
    for length in (2048, 8192, 32768):
        yield AttentionCase(name=f"prefill {length}", seqs=((length, length),))
    yield AttentionCase(name="prefill 16 x 512", seqs=((512, 512),) * 16)
    for before in (8192, 30720):
        yield AttentionCase(name=f"chunk 2048 @ {before}", seqs=((2048, before + 2048),))
    decodes = ((1, 2048),) * 64
    for before in (0, 8192):
        name = f"mixed 64 x ctx2048 + 1984 chunk @{before}"
        yield AttentionCase(name=name, seqs=(*decodes, (1984, before + 1984)))
    yield AttentionCase(name="verify 64 x ctx2048 k3", seqs=((4, 2048),) * 64)


def _dense() -> Iterator[DenseCase]:
    for length, head_size, dtype in product((512, 2048, 8192), (64, 128), ("bfloat16", "float32")):
        heads = Heads(head_size=head_size)
        for num_queries, shape in ((length, f"{length}"), (1, f"1 @ {length - 1}")):
            yield DenseCase(
                name=f"dense {shape} d{head_size} {dtype}",
                num_queries=num_queries,
                num_tokens=length,
                dtype=dtype,
                heads=heads,
            )


def _writes() -> Iterator[WriteCase]:
    for num_tokens in (64, 256, 2048, 8192):
        yield WriteCase(name=f"kv_write {num_tokens}", num_tokens=num_tokens)


_ALL: tuple[Case, ...] = (*_decodes(), *_prefills(), *_writes(), *_dense(), *sample_cases())
CASES = {case.name: case for case in _ALL}
"""All cases by name, in the order in which they are measured."""


def choose_cases(patterns: Sequence[str]) -> list[Case]:
    """The cases of some names or shell patterns; of none: all but those of over 3 GB of K and V.

    Raises:
        SimserveError: a pattern fits no case.
    """
    if not patterns:
        return [case for case in CASES.values() if not _is_large(case)]
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in CASES if fnmatchcase(name, pattern)}
        if not found:
            families = ", ".join(dict.fromkeys(_family(name) for name in CASES))
            raise SimserveError(
                f"--cases: no case is called '{pattern}'{did_you_mean(pattern, CASES)}; they begin "
                f"with {families}, and patterns such as 'decode b64*' choose several"
            )
        chosen |= found
    return [case for name, case in CASES.items() if name in chosen]


def choose_ways(names: Sequence[str]) -> tuple[str, ...]:
    """The ways of computing a case that are measured; of none: all but `article`.

    Raises:
        SimserveError: there is no such way.
    """
    for name in names:
        if name not in WAYS:
            raise SimserveError(
                f"--paths: '{name}' is none of {', '.join(WAYS)}{did_you_mean(name, WAYS)}"
            )
    return tuple(names) or DEFAULT_WAYS


def _is_large(case: Case) -> bool:
    return not isinstance(case, DenseCase) and case.num_bytes > _LARGE_KV_BYTES


def _family(name: str) -> str:
    return "fp8 KV decode" if name.startswith("fp8") else name.split()[0]
