"""Sampling: logits -> the next token of each row. It knows no requests and no grammar.

Order: repetition, frequency and presence penalty; logit_bias; logit processor; mask; temperature; top-k;
top-p; min-p. Ties at a cut are kept. A row's draw depends only on its logits, its seed and its step
(draw.py).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from runtime.engine.sampling.draw import pick
from runtime.engine.sampling.logit_processors import OUTPUT_IDS, PROMPT_IDS, Processors
from runtime.engine.sampling.logprobs import NOT_FINITE, Logits
from runtime.engine.sampling.penalties import Histograms, Ids, adjust, every, listed
from runtime.plan import Row, Sample, TokenMask

Then: TypeAlias = Callable[[Tensor], None]
"""Called with the drawn ids [rows], on the device, before the host waits for them; below 0: none."""
ROWS_AT_ONCE = 16  # so that the data stays in the CPU's cache
NOTHING_ALLOWED = "the mask allows no token"
NOTHING_LEFT = "the mask and the logit processor {name!r} together allow no token"


def key_of(seed: int, step: int) -> int:
    """64 random bits, a pure function of (seed, step)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, step), digest_size=8).digest()
    return int.from_bytes(digest, "little")


_EIGHT = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.uint8).view(np.uint64).reshape(256)
"""The bits of each byte value, one per byte, the lowest first."""


class Forbidden:
    """Unpacks masks of one width at a time. On a GPU the packed bits are transferred and unpacked there."""

    def __init__(self) -> None:
        self._bits = np.empty((0, 0), dtype=np.uint32)
        self._bytes = np.empty((0, 0), dtype=np.uint64)

    def fill(self, masks: Sequence[npt.NDArray[np.uint32]], vocab: int, device: torch.device) -> Tensor:
        """Packed little-endian masks of each row -> bool [rows, vocab] on `device`, True if the bit is 0; ids
        beyond a row's mask are forbidden too. On the CPU the result is valid until the next call."""
        rows, width = len(masks), -(-vocab // 32)
        if self._bits.shape[0] < rows or self._bits.shape[1] != width:
            self._bits = np.empty((rows, width), dtype=np.uint32)
            self._bytes = np.empty((rows, width * 4), dtype=np.uint64)
        bits = self._bits[:rows]
        for row, mask in zip(bits, masks, strict=True):
            count = min(len(mask), width)
            np.invert(mask[:count], out=row[:count])
            row[count:] = 0xFFFFFFFF
        if device.type == "cpu":
            spread = self._bytes[:rows]
            np.take(_EIGHT, bits.view(np.uint8), out=spread, mode="clip")
            return torch.from_numpy(spread.view(np.bool_)[:, :vocab])
        packed = torch.from_numpy(bits.view(np.int32)).to(device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        return ((packed[:, :, None] >> shifts) & 1).bool().view(rows, -1)[:, :vocab]


class Sampler:
    """Draws tokens; keeps the penalties' counts of live sequences until they are released.
    computes_logsumexp: at_once() computes the log-sum-exp of logits itself."""

    computes_logsumexp = False

    def __init__(self, processors: Processors | None = None) -> None:
        self.processors = processors or Processors()
        self._histograms = Histograms()
        self._forbidden = Forbidden()

    def release(self, handles: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        if self._histograms.by_seq:
            self._histograms.release(handles)

    def sample(
        self, logits: Tensor, rows: Sequence[Row], masks: Mapping[int, TokenMask], keys: Sequence[int]
    ) -> list[int | str]:
        """logits [len(rows), vocab] float32, finite -> one id per row, or an error message. masks: by index
        into rows. keys: 64 bits per row, see key_of(), ignored for greedy rows. Each row has its own
        `seq`."""
        answers: list[int | str] = [NOTHING_ALLOWED] * len(rows)
        plain: list[int] = []
        changed: list[int] = []
        for index, row in enumerate(rows):
            changes = index in masks or row.sampling.custom_logit_processor is not None
            (changed if changes or row.sampling.adjusts_logits else plain).append(index)
        for group in (plain, changed):
            for first in range(0, len(group), ROWS_AT_ONCE):
                some = group[first : first + ROWS_AT_ONCE]
                some_rows = [rows[index] for index in some]
                faults: dict[int, str] = {}  # by index into `some`
                if group is changed:
                    scores = logits[some]
                    faults = self._change(scores, some_rows, [masks.get(index) for index in some])
                else:
                    scores = logits if len(some) == len(rows) else logits[some]
                picked = pick(scores, [row.sampling for row in some_rows], [keys[index] for index in some])
                for at, (index, column) in enumerate(zip(some, picked)):
                    answers[index] = self._answer(rows[index], column, faults.get(at))
        return answers

    def at_once(
        self,
        logits: Logits,
        rows: Sequence[Row],
        masks: Mapping[int, TokenMask],
        keys: Sequence[int],
        then: Then | None = None,
    ) -> list[Sample | str] | None:
        """sample() together with log-probabilities, if both can be computed in one. Here: if all rows take
        the best id that their mask allows, and ask for nothing else. Otherwise None. Rows need not be finite;
        others give NOT_FINITE. then: used on GPUs."""
        if logits.total is not None or logits.logits.device.type != "cpu":
            return None
        params = [row.sampling for row in rows]
        if any(not one.greedy or one.custom_logit_processor or one.adjusts_logits for one in params):
            return None
        table = logits.logits.numpy()
        with np.errstate(invalid="ignore"):  # a sum is finite only if its terms are
            finite = np.isfinite(table.sum(-1)).tolist()
        best = table.argmax(-1).tolist()
        results: list[Sample | str] = [
            Sample(token) if well else NOT_FINITE for token, well in zip(best, finite)
        ]
        for index, mask in masks.items():
            if finite[index] and not mask.allows(best[index]):
                results[index] = self._best_allowed(logits.logits[index], mask)
        return results

    def _best_allowed(self, logits: Tensor, mask: TokenMask) -> Sample | str:
        """logits [vocab], finite."""
        forbidden = self._forbidden.fill([mask.bits], logits.shape[0], logits.device)[0]
        scores = logits.masked_fill(forbidden, -math.inf).numpy()
        best = int(scores.argmax())
        return NOTHING_ALLOWED if scores[best] == -math.inf else Sample(best)

    def sample_listed(
        self, values: Sequence[Tensor], lists: Sequence[Ids], rows: Sequence[Row], keys: Sequence[int]
    ) -> list[int | str]:
        """sample() if only the logits of the allowed ids are known: per row its ascending ids, and their
        logits [ids] float32, finite. No row has a logit processor."""
        answers: list[int | str] = []
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            scores = pad_sequence(list(values[some]), batch_first=True, padding_value=-math.inf)
            if any(row.sampling.adjusts_logits for row in rows[some]):
                adjust(scores, rows[some], self._histograms, listed(lists[some]))
            ids_of_rows = pad_sequence([torch.tensor(ids) for ids in lists[some]], batch_first=True)
            picked = pick(scores, [row.sampling for row in rows[some]], keys[some], ids_of_rows)
            answers += [
                NOTHING_ALLOWED if column is None else int(ids[column])
                for ids, column in zip(lists[some], picked)
            ]
        return answers

    @staticmethod
    def _answer(row: Row, token: int | None, fault: str | None) -> int | str:
        """token: the one drawn; None: none is allowed."""
        if fault is not None:
            return fault
        if token is not None:
            return token
        name = row.sampling.custom_logit_processor
        return NOTHING_ALLOWED if name is None else NOTHING_LEFT.format(name=name)

    def _change(
        self, scores: Tensor, rows: Sequence[Row], masks: Sequence[TokenMask | None]
    ) -> dict[int, str]:
        """Apply penalties, biases, logit processors and masks to scores [rows, vocab], in place. Returns
        errors by row."""
        adjust(scores, rows, self._histograms, every(scores.shape[1]))
        faults = self._process(scores, rows)
        masked = [index for index, mask in enumerate(masks) if mask is not None]
        if masked:
            bits = [_bits_of(mask, scores.shape[1]) for mask in masks if mask is not None]
            forbidden = self._forbidden.fill(bits, scores.shape[1], scores.device)
            if len(masked) == len(rows):
                scores.masked_fill_(forbidden, -math.inf)
            else:
                scores[masked] = scores[masked].masked_fill_(forbidden, -math.inf)
        return faults

    def _process(self, scores: Tensor, rows: Sequence[Row]) -> dict[int, str]:
        """Run the rows' logit processors on scores, in place, each once over all its rows. If a processor
        fails, the rows are run one by one, and only the failing ones have errors."""
        faults: dict[int, str] = {}
        rows_of: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            if (name := row.sampling.custom_logit_processor) is not None:
                rows_of.setdefault(name, []).append(index)
        for name, mine in rows_of.items():
            try:
                scores[mine] = self._processed(name, scores[mine], [rows[index] for index in mine])
                continue
            except Exception as error:  # noqa: BLE001 - it is these requests' answer
                if len(mine) == 1:
                    faults[mine[0]] = _failed(name, error)
                    continue
            for index in mine:
                try:
                    scores[[index]] = self._processed(name, scores[[index]], [rows[index]])
                except Exception as error:  # noqa: BLE001 - it is this request's answer
                    faults[index] = _failed(name, error)
        return faults

    def _processed(self, name: str, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        params = [
            {**(row.sampling.custom_params or {}), PROMPT_IDS: row.prompt, OUTPUT_IDS: row.output}
            for row in rows
        ]
        processed = self.processors.get(name).process(logits, params)
        if not isinstance(processed, Tensor) or processed.shape != logits.shape:
            raise ValueError(f"it must return logits of the shape {tuple(logits.shape)}")
        if bool((processed.isnan() | (processed == math.inf)).any()):
            raise ValueError("it returned NaN or infinity")
        return processed.to(logits)


def _bits_of(mask: TokenMask, vocab: int) -> npt.NDArray[np.uint32]:
    """Its bits; a mask from another process may have only its list of ids."""
    bits: npt.NDArray[np.uint32] | None = mask.bits
    if bits is None:
        assert mask.allowed is not None
        allowed = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
        allowed[mask.allowed[mask.allowed < vocab]] = 1
        bits = np.packbits(allowed, bitorder="little").view(np.uint32)
    return bits


class Unsampled(Sampler):
    """Used if another rank's draws count: every row gets token 0."""

    def at_once(self, logits: Logits, rows: Sequence[Row], *_: Any, **__: Any) -> list[Sample | str] | None:
        return [Sample(0)] * len(rows)

    def sample_listed(self, values: Sequence[Tensor], *_: Any, **__: Any) -> list[int | str]:
        return [0] * len(values)


def _failed(name: str, error: Exception) -> str:
    return f"the logit processor {name!r} failed: {type(error).__name__}: {error}"
