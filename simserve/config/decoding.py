"""Configuration of how many sequences a request becomes, and which of them are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simserve.config.base import Fraction, Natural, Shape, StrictModel

__all__ = ["BeamSearch", "BestOf", "Decoding", "Parallel"]

Width = Annotated[int, Field(ge=1, le=2**14)]


class Parallel(StrictModel):
    """Sequences that share a prompt: n > 1."""

    kind: Literal["parallel"]
    n: Width = 1
    """Sequences of each request."""
    end_probability: Fraction = 0.0
    """Each token of a sequence is its last with this probability (seeded). 0: all go on to
    output_len."""


class BeamSearch(StrictModel):
    """Rounds of one-token requests; the best continuations of each are sent as the next."""

    kind: Literal["beam_search"]
    beam_width: Width
    """Beams in each round but the first, which has one."""
    length_penalty: Shape = 1.0
    """Score of a sequence: its cumulative log-probability over its tokens, prompt included, to the
    power of this. Real tokens only."""
    eos_token_id: Natural | None = None
    """The token that ends a sequence. null: none does. Real tokens only."""
    early_stopping: bool = False
    """End as soon as beam_width sequences are finished. false: after output_len rounds."""
    fork_probability: Fraction = 0.0
    """Where nothing is sampled: a beam takes the place of another with this probability."""
    end_probability: Fraction = 0.0
    """Where nothing is sampled: a beam of a round finishes a sequence with this probability."""


class BestOf(StrictModel):
    """Sequences that share a prompt, of which the likeliest is returned. Real tokens only."""

    kind: Literal["best_of"]
    best_of: Width
    """Sequences of each request."""
    length_penalty: Shape = 0.0
    """Score of a sequence: its cumulative log-probability over its output tokens to the power of
    this. 0: that probability itself; 1: the mean over its tokens."""


Decoding = Annotated[Parallel | BeamSearch | BestOf, Field(discriminator="kind")]
