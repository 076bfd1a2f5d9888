"""The bases of all requests, and how the fields of a request for several prompts spread over its items.

With n samples of each of N prompts the items come as p1, p2, ..., p1, p2, ...: item i is prompt i % N. A list
has one entry per prompt (or already one per item); anything else is meant for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Self

import msgspec

from runtime.protocol.errors import BadRequest
from runtime.protocol.sampling import set_fields

MAX_NAME_BYTES = 512
"""Of an id, a session's name or a salt."""
NO_PROMPT = "Either text, input_ids or input_embeds should be provided."
UNEQUAL_N = "The parallel_sample_num should be the same for all samples in sample params."
HIDDEN = "return_hidden_states must be a boolean or the string literal 'last'"
MAX_ITEMS = 65_536
"""Items of one request, at most: prompts times samples."""
MAX_SPREAD_BYTES = 64 << 20
"""Of one sampling_params that is meant for all items, once for each of them."""
BOOTSTRAP_ROOMS = 1 << 63
SAMPLE_STRIDE = 0x1E3779B97F4A7C15
"""From a prompt's bootstrap_room to that of its next sample: far, so that no two prompts' samples meet."""


def new_rid() -> str:
    return os.urandom(16).hex()


class BaseReq(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """A message about one request, or, before it is normalised, about several. `http_worker_ipc`: the
    frontend that gets the answer, if there are several."""

    rid: str | list[str] | None = None
    http_worker_ipc: str | None = None

    def regenerate_rid(self) -> str | list[str]:
        """Give the request fresh ids, as many as it has, and return them."""
        self.rid = [new_rid() for _ in self.rid] if isinstance(self.rid, list) else new_rid()
        return self.rid


class SingleReq(BaseReq, kw_only=True):
    """A message about exactly one request, or one control verb: it always has an id."""

    rid: str = msgspec.field(default_factory=new_rid)


class BaseBatchReq(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """A message about several requests; parallel lists, one entry per rid. `http_worker_ipcs`: their
    frontends; None if the items name them, or there is one frontend."""

    rids: list[str] = []
    http_worker_ipcs: list[str | None] | None = None

    def regenerate_rids(self) -> list[str]:
        """Give every item a fresh id and return them."""
        self.rids = [new_rid() for _ in self.rids]
        return self.rids


class SpeculativeDecodingMetricsMixin(BaseBatchReq, kw_only=True):
    """The figures of drafted tokens; parallel lists, one entry per rid, empty if nothing was drafted.

    spec_verify_ct             verification steps
    spec_accepted_tokens       drafted tokens that were accepted
    spec_drafted_tokens        drafted tokens that were verified
    spec_acceptance_histogram  [i]: steps in which exactly i drafted tokens were accepted
    """

    spec_verify_ct: list[int] = []
    spec_accepted_tokens: list[int] = []
    spec_drafted_tokens: list[int] = []
    spec_acceptance_histogram: list[list[int]] = []

    # Newer names of two of them.
    spec_num_correct_drafts = property(attrgetter("spec_accepted_tokens"))
    spec_correct_drafts_histogram = property(attrgetter("spec_acceptance_histogram"))

    @property
    def spec_accept_length(self) -> list[float]:
        """Tokens per verification step, with the sampled one; 0 without steps."""
        pairs = zip(self.spec_accepted_tokens, self.spec_verify_ct, strict=True)
        return [(accepted + steps) / steps if steps else 0.0 for accepted, steps in pairs]

    @property
    def spec_accept_rate(self) -> list[float]:
        """Share of drafted tokens that were accepted; 0 without drafts."""
        pairs = zip(self.spec_accepted_tokens, self.spec_drafted_tokens, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]


class Spread:
    """prompts: N; copies: n; total: items. `single`: one prompt, not in a list, and one sample."""

    __slots__ = ("copies", "prompts", "single", "total")

    def __init__(self, prompts: int, copies: int, single: bool) -> None:
        if prompts * copies > MAX_ITEMS:
            raise BadRequest(f"{prompts} prompts with {copies} samples each; at most {MAX_ITEMS} in all")
        self.prompts, self.copies, self.single, self.total = prompts, copies, single, prompts * copies

    def each(self, name: str, value: Any, read: Callable[[Any], Any] = lambda one: one) -> Any:
        """A field's values, one per item; None if there are none. read: checks and converts one value."""
        if isinstance(value, list):
            return self.whole(name, [read(one) for one in value])
        value = read(value)
        return None if value is None else [value] * self.total

    def whole(self, name: str, values: list[Any]) -> list[Any]:
        """A list with one entry per prompt, or per item, as one per item."""
        if len(values) == self.prompts:
            return values * self.copies
        if len(values) == self.total:
            return values
        raise BadRequest(
            f"{name} should be equal to the batch size: it has {len(values)} entries for "
            f"{self.prompts} prompts",
            where=name,
        )


class ManyReq(BaseReq, dict=True):
    """A user's request for one prompt or several. Normalising sets `spread` and `items` beside the fields;
    until then it has no size. WHOLE: fields with lists that belong to every item as a whole."""

    WHOLE: ClassVar[frozenset[str]] = frozenset()

    def set_size(self, spread: Spread) -> None:
        """The fields are normalised."""
        self.__dict__.update(spread=spread, items={})

    @property
    def is_normalized(self) -> bool:
        return "spread" in self.__dict__

    @property
    def spread(self) -> Spread:
        """How many prompts and samples there are."""
        try:
            spread: Spread = self.__dict__["spread"]
        except KeyError:
            raise AttributeError("normalize_batch_and_arguments() has not been called") from None
        return spread

    @property
    def is_single(self) -> bool:
        return self.spread.single

    @property
    def batch_size(self) -> int:
        return self.spread.prompts

    @property
    def parallel_sample_num(self) -> int:
        return self.spread.copies

    def regenerate_rid(self) -> str | list[str]:
        """Give the request and its items fresh ids, and return them."""
        rids = super().regenerate_rid()
        for index, item in self.__dict__.get("items", {}).items():
            item.rid = rids[index]
        return rids

    def __len__(self) -> int:
        """Items: prompts times samples."""
        return self.spread.total

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Self]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Self:
        """Item `index`, normalised; always the same object. A single request is its only item."""
        spread = self.spread
        if not -spread.total <= index < spread.total:
            raise IndexError(f"item {index} of a request with {spread.total}")
        if spread.single:
            return self
        index %= spread.total
        items: dict[int, Self] = self.__dict__["items"]
        if index not in items:
            items[index] = self._item(index)
        return items[index]

    def _item(self, index: int) -> Self:
        fields = set_fields(self)
        for name, values in fields.items():
            if isinstance(values, list) and name not in self.WHOLE:
                fields[name] = values[index]
        item = type(self)(**fields)
        item.set_size(Spread(1, 1, True))
        return item


def count_samples(params: Any) -> int:
    """The `n` of sampling_params: a dict, a SamplingParams, or a list of these, which must agree."""
    if not isinstance(params, list):
        return _n(params)
    counts = {_n(one) for one in params} or {1}
    if len(counts) > 1:
        raise BadRequest(UNEQUAL_N)
    return counts.pop()


def _n(params: Any) -> int:
    n = params.get("n") if isinstance(params, dict) else getattr(params, "n", None)
    if n is None:
        return 1
    if type(n) is not int or n < 1:
        raise BadRequest(f"must be at least 1, got {n!r}", where="sampling_params.n")
    return n


def count_prompts(text: Any, input_ids: Any, input_embeds: Any) -> tuple[int, bool]:
    """The number of prompts, and whether it is one prompt outside a list."""
    if text is not None:
        if isinstance(text, str):
            return 1, True
        return _length("text", text, "a string or a list of strings"), False
    if input_ids is not None:
        count = _length("input_ids", input_ids, "a list of token ids, or a list of such lists")
        return (1, True) if isinstance(input_ids[0], int) else (count, False)
    count = _length("input_embeds", input_embeds, "a list of vectors, or a list of such lists")
    first = input_embeds[0]
    single = isinstance(first, list) and bool(first) and isinstance(first[0], (int, float))
    return (1, True) if single else (count, False)


def count_ids(input_ids: Any) -> int:
    """Ids of one prompt, or of all. Fast: one prompt, which may have a million, is not looked through."""
    if not input_ids:
        return 0
    many = isinstance(input_ids[0], list)
    return sum(len(one) if isinstance(one, list) else 1 for one in input_ids) if many else len(input_ids)


def _length(name: str, value: Any, what: str) -> int:
    if not isinstance(value, (list, tuple)):
        raise BadRequest(f"{name} should be {what}, got {type(value).__name__}.", where=name)
    if not value:
        raise BadRequest(f"{name} cannot be empty.", where=name)
    return len(value)


def rids(rid: Any, spread: Spread) -> str | list[str]:
    """An id for each item: fresh ones; `rid` with _0, _1, ...; or those of a list."""
    if spread.single:
        if rid is None:
            return new_rid()
        if not isinstance(rid, str):
            raise BadRequest("rid should be a string for a single request.", where="rid")
        return rid
    match rid:
        case None:
            return [new_rid() for _ in range(spread.total)]
        case str():
            return [f"{rid}_{index}" for index in range(spread.total)]
        case list() if len(rid) == spread.total:
            return rid
        case list() if len(rid) == spread.prompts:
            return [f"{one}_{copy}" for copy in range(spread.copies) for one in rid]
        case list():
            raise BadRequest(
                f"The specified rids length mismatch with the batch size: {len(rid)} rids for "
                f"{spread.prompts} prompts.",
                where="rid",
            )
        case _:
            raise BadRequest("The rid should be a string or a list of strings.", where="rid")


def check_unique(rids: str | list[str] | None) -> None:
    if not isinstance(rids, list):
        return
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for rid in rids:
        if not isinstance(rid, str):
            raise BadRequest("The rid should be a string or a list of strings.", where="rid")
        if rid in seen:
            twice[rid] = None
        seen.add(rid)
    if twice:
        raise BadRequest(f"Duplicate request IDs detected within the request: {list(twice)}", where="request")


def images(data: Any, spread: Spread) -> tuple[list[Any], list[str | None] | None]:
    """The images of each item, each a list or None, and its modality; no modalities where there is no image.

    One image is for every item; a flat list has one per prompt; a list of lists has several per prompt."""
    if data is None or data == []:
        return [None] * spread.total, None
    if not isinstance(data, list):
        return [[data]] * spread.total, ["image"] * spread.total
    if len(data) not in (spread.prompts, spread.total):
        raise BadRequest(
            f"The length of image_data should be equal to the batch size: {len(data)} for {spread.prompts}.",
            where="image_data",
        )
    nested = any(isinstance(one, list) for one in data)
    lists = data if nested else [[one] for one in data]
    kinds = [_modality(one) for one in lists]
    return spread.whole("image_data", lists), spread.whole("modalities", kinds)


def _modality(images: Any) -> str | None:
    if not images or images == [None]:
        return None
    return "image" if not isinstance(images, list) or len(images) == 1 else "multi-images"


def token_ids(value: Any, spread: Spread) -> Any:
    """Ids whose log-probabilities are wanted: a flat list, or one id, is for every item."""
    if type(value) is int:
        value = [value]
    if not value:
        return None
    if spread.single:
        return value
    if not isinstance(value, list):
        raise BadRequest(
            "token_ids_logprob should be a list of token ids, or a list of such lists.",
            where="token_ids_logprob",
        )
    if all(isinstance(one, int) for one in value):
        return [value] * spread.total
    return spread.whole("token_ids_logprob", value)


def hidden_states(value: Any) -> Any:
    """One item's return_hidden_states: none, all, or those of the last token."""
    if not isinstance(value, bool) and value != "last":
        raise BadRequest(f"{HIDDEN}, got {value!r}.", where="return_hidden_states")
    return value


def extra_key(value: Any, name: str = "extra_key") -> str | None:
    if isinstance(value, list):
        raise BadRequest(f"{name} should be a string, not a list, for a single request.", where=name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{name} should be a string, got {type(value).__name__}.", where=name)
    return value


def cache_salt(value: Any) -> str | None:
    """One item's salt; "" is none."""
    return extra_key(value, "cache_salt") or None


def bootstrap_rooms(value: Any, spread: Spread) -> list[int | None] | None:
    """One number per item: consecutive ones, or for the samples of a listed one, numbers far apart."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [(value + index) % BOOTSTRAP_ROOMS for index in range(spread.total)]
    numbers: list[int | None] | None = spread.each("bootstrap_room", value)
    if numbers is None or not isinstance(value, list) or len(value) == len(numbers):
        return numbers
    return [
        (number + index // spread.prompts * SAMPLE_STRIDE) % BOOTSTRAP_ROOMS
        if isinstance(number, int)
        else number
        for index, number in enumerate(numbers)
    ]


def params_of(value: Any, spread: Spread, change: Callable[[Any], Any] = lambda one: one) -> Any:
    """sampling_params, {} if there are none; `change` is applied to each."""
    if spread.single:
        if isinstance(value, list):
            raise BadRequest(
                "sampling_params should be a dict, not a list, for a single request.", where="sampling_params"
            )
        return change({} if value is None else value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return spread.whole("sampling_params", [change({} if one is None else one) for one in value])
    params = change({} if value is None else value)
    if isinstance(params, dict) and spread.total > 1:
        _check_spread(params, spread)
    return [params] * spread.total


def _check_spread(params: dict[Any, Any], spread: Spread) -> None:
    try:
        size = len(msgspec.json.encode(params))
    except (TypeError, ValueError, RecursionError):
        return  # no JSON: reading them reports what is wrong
    if size * spread.total > MAX_SPREAD_BYTES:
        raise BadRequest(
            f"{size} bytes for each of {spread.total} prompts and samples; at most {MAX_SPREAD_BYTES} in all",
            where="sampling_params",
            hint="send several requests",
        )
