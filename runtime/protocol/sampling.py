"""SamplingParams: how the next token is drawn and when generation ends.

Validates ranges; does not know tokenizers, constraints' meaning or models. Defaults and ranges follow the
field's usage (temperature below 1e-6 means greedy).
"""

from __future__ import annotations

import math

import msgspec

from runtime.protocol.errors import BadRequest

GREEDY_BELOW = 1e-6
MAX_STOPS = 32


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All sampling words of one request.

    max_new_tokens: 0 commits the prompt to the prefix cache and generates nothing. top_k: -1 = off.
    seed: same seed, same prompt -> same output, whatever else is in the batch; None draws a fresh one.
    stop: strings, up to 32; stop_token_ids: ids; ignore_eos ignores end-of-text and stop_token_ids, not
    `stop`.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def verify(self) -> SamplingParams:
        """Return self, or raise BadRequest naming the field, its value and the range."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_new_tokens", self.max_new_tokens >= 0, "must be at least 0"),
            (
                "min_new_tokens",
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"must be in [0, max_new_tokens({self.max_new_tokens})]",
            ),
            ("temperature", 0.0 <= self.temperature < math.inf, "must be a finite number, at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "must be -1 (off) or at least 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be in [0, 1]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be in [-2, 2]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be in [-2, 2]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 2.0, "must be in (0, 2]"),
            ("stop", len(self.stop) <= MAX_STOPS, f"takes at most {MAX_STOPS} strings"),
            ("stop", all(self.stop), "must not contain an empty string"),
            ("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "must be ids, 0 or greater"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "must be in [0, 2**63)"),
        )
        for name, ok, rule in checks:
            if not ok:
                raise BadRequest(
                    f"{name} {rule}, got {getattr(self, name)!r}", where=f"sampling_params.{name}"
                )
        return self
