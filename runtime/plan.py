"""What the scheduler asks of a model step, and the results. The control plane decides in ints, the compute
plane computes in tensors; this module knows neither torch nor requests.

A sequence's KV is a list of runs of slots in the pool. A plan names each piece of KV once, as a Segment, with
the rows that attend to the whole of it. Plans and results travel as they are (runtime/ipc/plans.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from runtime.protocol.control import MemoryPart
from runtime.protocol.sampling import SamplingParams


class Run(NamedTuple):
    """`length` consecutive KV slots of the pool, the first of them `start`. One slot holds one token."""

    start: int
    length: int


class Segment(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """KV of earlier tokens which every row in `rows` attends to in whole (sliding window aside).

    `position` is the position of its first token in those rows' sequences; `runs` are in token order and
    their lengths add up to the segment's. Segments of one row do not overlap and, together, cover exactly the
    positions 0 .. row.position - 1.
    """

    runs: tuple[Run, ...]
    rows: tuple[int, ...]
    position: int

    @property
    def length(self) -> int:
        return sum([run.length for run in self.runs])


class MediaSpan(NamedTuple):
    """tokens[first : first + length] of a row stand for embeddings of an item, from its `offset` on."""

    item: int
    offset: int
    first: int
    length: int


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One sequence's part in a step: tokens to compute, and what is wanted from their logits.

    seq        the sequence's handle, unique while it lives
    tokens     input ids to compute now, at least one
    position   of tokens[0]: the number of KV entries before it
    slots      for the new KV: runs whose lengths add up to len(tokens)
    sample     whether to sample a token after the last input token that is no draft
    step       number of tokens generated so far, which keys the random draw, with the seed
    scores     (index into tokens, target id): the natural log-probability of the target after tokens[index]
               is wanted, at temperature 1, without mask
    prompt     all prompt ids, read only with a repetition penalty or a logit processor
    output     all ids generated so far, read only with any penalty or a logit processor. Neither changes
               between launch() and finish()
    score_top  how many best (id, logprob) pairs are wanted at each of `scores`
    token_ids  ids whose log-probabilities are wanted at the sampled position and at each of `scores`
    hidden     the tokens whose final hidden states are wanted
    logprob    whether the sampled token's log-probability is wanted
    start      position of the first output token, read only if log-probabilities are scaled by temperature
    masked     whether finish() may bring a mask for it
    drafts     how many of the last `tokens` are drafts: see RowResult.samples
    guesses    how many tokens a draft model should guess after the last sample: see RowResult.guesses
    adapter    the LoRA adapter's number; 0: none
    media      the tokens that stand for parts of pictures, in their order
    shift      added to positions for the rotary embedding from the first of `tokens` on (or from the first of
               a picture that is cut there): pictures take fewer positions than tokens
    """

    seq: int
    tokens: tuple[int, ...]
    position: int
    slots: tuple[Run, ...]
    sampling: SamplingParams
    sample: bool = True
    step: int = 0
    scores: tuple[tuple[int, int], ...] = ()
    top_logprobs: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    score_top: int = 0
    token_ids: tuple[int, ...] = ()
    hidden: Literal["none", "last", "all"] = "none"
    logprob: bool = True
    start: int = 0
    masked: bool = False
    drafts: int = 0
    adapter: int = 0
    media: tuple[MediaSpan, ...] = ()
    guesses: int = 0
    shift: int = 0


class StepPlan(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One forward pass. `released` are handles of sequences that will not come again."""

    rows: tuple[Row, ...]
    segments: tuple[Segment, ...]
    released: tuple[int, ...] = ()

    @property
    def token_count(self) -> int:
        return sum([len(row.tokens) for row in self.rows])


class TokenMask(NamedTuple):
    """The ids that may be sampled. `bits`: little-endian uint32 [ceil(vocab / 32)], bit 1 = allowed.
    `allowed`: the same as sorted int64 ids, if the mask is sparse. `behind`: of a row with drafts, the masks
    after each of them; nothing is sampled after a draft that has none."""

    bits: Any
    allowed: Any | None = None
    behind: tuple[TokenMask, ...] = ()

    def allows(self, token: int) -> bool:
        word = token >> 5
        return word < len(self.bits) and bool(int(self.bits[word]) >> (token & 31) & 1)


class Sample(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A sampled token.

    logprob    its log-probability without mask, penalties and biases, at temperature 1 or, by an option, the
               row's own; None if row.logprob is False
    top        (id, logprob) pairs, best first, len == row.top_logprobs
    token_ids  log-probabilities, one per row.token_ids
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    token_ids: tuple[float, ...] = ()


class RowResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The result of one row. error: its numbers were not finite, or its mask or its logit processor left no
    token; then the rest is empty.

    samples          none if row.sample is False; else one, and maybe another after each draft that equals
                     the sample of its position. The KV of the other drafts is of no use
    scores           one per row.scores, same order
    score_tops       per row.scores its row.score_top best pairs
    score_token_ids  per row.scores one per row.token_ids
    hidden           [tokens wanted, hidden_size], final norm applied
    guesses          at most row.guesses tokens that a draft model expects behind the last sample
    """

    samples: tuple[Sample, ...] = ()
    scores: tuple[float, ...] = ()
    score_tops: tuple[tuple[tuple[int, float], ...], ...] = ()
    score_token_ids: tuple[tuple[float, ...], ...] = ()
    hidden: tuple[tuple[float, ...], ...] = ()
    error: str | None = None
    guesses: tuple[int, ...] = ()

    @property
    def token(self) -> int | None:
        return self.samples[0].token if self.samples else None


class StepResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Results in the order of plan.rows. seconds: the model computed, sampling included; forward_s: until the
    final hidden states. 0: not measured."""

    rows: tuple[RowResult, ...]
    seconds: float = 0.0
    forward_s: float = 0.0


class Adapter(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A LoRA adapter in the directory `path`. number: how rows name it, from 1 on; no other one ever has it.
    name: what users call it. pinned: once used, it stays on the device."""

    number: int
    name: str
    path: str
    pinned: bool = False


class Image(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A picture as the model takes it. number: how spans name it, from 1 on; no other one ever has it.
    pixels: uint8 [height, width, 3], red, green, blue."""

    number: int
    height: int
    width: int
    pixels: bytes


class Runner(Protocol):
    """Runs plans. Two verbs, so that grammar masks are filled while the forward pass runs: exactly one
    finish() follows each launch(). launch() returns at once if the device allows it. Rows may name adapters
    and images that it has loaded."""

    @property
    def slots(self) -> int:
        """How many token slots the KV pool has."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits; ids at and above it are never sampled."""
        ...

    def verify(self, params: SamplingParams) -> None:
        """Raise BadRequest for unsupported parameters, such as an unknown logit processor."""
        ...

    def launch(self, plan: StepPlan) -> None: ...

    def done(self) -> bool:
        """Whether the launched pass has ended or failed. Returns at once; called often."""
        ...

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        """Sample with `masks` (row index -> mask; absent = all ids allowed) and return the results."""
        ...

    def load_adapter(self, adapter: Adapter) -> None:
        """Rows may name it from now on; also during a step. Raises AdapterError, and changes nothing then."""
        ...

    def unload_adapter(self, number: int) -> None:
        """Forget it, if it is loaded: no row will name it any more. Possible while a step is under way."""
        ...

    def load_images(self, images: Sequence[Image]) -> None:
        """Rows may name them from now on. Between two steps."""
        ...

    def drop_images(self, numbers: Sequence[int]) -> None:
        """No row will name them any more. Between two steps."""
        ...

    def update_weights(self, path: str) -> None:
        """Use the weights of the checkpoint in `path` from the next pass on; KV computed before is void.
        Between two passes. Raises ModelLoadError, BadRequest, and changes nothing then."""
        ...

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Free the memory of these parts; their contents are lost, and there are no passes until
        restore_memory() has restored all of them. Between two passes; parts that are released stay so. Raises
        BadRequest, and changes nothing then."""
        ...

    def restore_memory(self, parts: Sequence[MemoryPart], path: str) -> None:
        """Create the KV pool again, read the weights of the checkpoint in `path`; parts that were not
        released stay as they are. Raises ModelLoadError."""
        ...

    def close(self) -> None: ...


class Text(msgspec.Struct, frozen=True, gc=False):
    """A whole text for an encoder. kinds: token type of each token; empty: all 0."""

    tokens: tuple[int, ...]
    kinds: tuple[int, ...] = ()


class TextResult(msgspec.Struct, frozen=True, gc=False):
    """vector: the pooled output, or a classifier's scores. error: set if its numbers were not finite."""

    vector: tuple[float, ...] = ()
    error: str | None = None


class TextRunner(Protocol):
    """Runs whole texts through an encoder."""

    def verify(self, params: SamplingParams) -> None:
        """Raise BadRequest: encoders do not generate text."""
        ...

    def encode(self, texts: Sequence[Text]) -> tuple[TextResult, ...]:
        """Results in the same order; a text's does not depend on the others. Raises InternalFault."""
        ...

    def close(self) -> None: ...
