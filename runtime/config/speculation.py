"""SpeculationConfig: whether and how tokens are drafted and verified together. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.options import option
from runtime.protocol.errors import BadRequest
from runtime.protocol.server_names import SPECULATION

ALGORITHMS = SPECULATION
DEFAULT_DRAFTS = {"NGRAM": 11, "STANDALONE": 3}


@dataclass(frozen=True)
class SpeculationConfig:
    """algorithm   NGRAM: the tokens that followed the same tokens earlier in the request's text (prompt
                look-up); STANDALONE: a smaller model's; None: no speculation
    drafts      maximum number of drafts per step of one sequence
    min_match   NGRAM: the minimum number of last tokens that must match earlier ones
    max_match   NGRAM: the maximum number compared; the longest match is used"""

    algorithm: str | None = None
    drafts: int = 0
    min_match: int = 2
    max_match: int = 12


NO_SPECULATION = SpeculationConfig()


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Options of EngineConfig."""

    speculative_algorithm: str | None = option(None)
    """speculative decoding, which does not change outputs: NGRAM (guess the tokens that followed the same
    tokens earlier in the request's text) or STANDALONE (guess with a smaller model). By default off"""
    speculative_draft_model_path: str | None = option(None)
    """with STANDALONE: checkpoint of the draft model; it must have the same vocabulary"""
    speculative_num_draft_tokens: int | None = option(None, within=(2, 128))
    """maximum number of tokens per sequence that a pass verifies, the certain one included. By default 12
    with NGRAM, 4 with STANDALONE"""
    speculative_num_steps: int | None = option(None, within=(1, 127))
    """with STANDALONE: number of passes of the draft model, one per guessed token"""
    speculative_ngram_min_match_window_size: int = option(2)
    """with NGRAM: minimum number of tokens that must match earlier text"""
    speculative_ngram_max_match_window_size: int = option(12)
    """with NGRAM: maximum number of tokens compared; the longest match is used"""

    def speculation(self) -> SpeculationConfig:
        """Raises BadRequest naming the option."""
        algorithm, model = self.speculative_algorithm, self.speculative_draft_model_path
        tokens, steps = self.speculative_num_draft_tokens, self.speculative_num_steps
        if algorithm is None:
            for name, value in (("draft_model_path", model), ("num_steps", steps)):
                if value is not None:
                    raise BadRequest(
                        "has no effect without speculative_algorithm",
                        where=f"speculative_{name}",
                        hint="--speculative-algorithm STANDALONE",
                    )
            return NO_SPECULATION
        name = algorithm.upper()
        if name not in ALGORITHMS:
            raise BadRequest(
                f"must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}", where="speculative_algorithm"
            )
        if name == "STANDALONE" and model is None:
            raise BadRequest(
                "STANDALONE needs the smaller model's checkpoint",
                where="speculative_algorithm",
                hint="--speculative-draft-model-path",
            )
        if name == "NGRAM" and (model is not None or steps is not None):
            option_name = "speculative_num_steps" if model is None else "speculative_draft_model_path"
            raise BadRequest("NGRAM has no draft model", where=option_name, hint="leave it out")
        if steps is not None and tokens is not None and steps != tokens - 1:
            raise BadRequest(
                f"must be speculative_num_draft_tokens - 1 = {tokens - 1}, got {steps}",
                where="speculative_num_steps",
            )
        least = self.speculative_ngram_min_match_window_size
        most = self.speculative_ngram_max_match_window_size
        if not 1 <= least <= most <= 64:
            raise BadRequest(
                f"must be in 1 to speculative_ngram_max_match_window_size, and that at most 64, got "
                f"{least} and {most}",
                where="speculative_ngram_min_match_window_size",
            )
        drafts = steps if tokens is None else tokens - 1
        return SpeculationConfig(name, drafts or DEFAULT_DRAFTS[name], least, most)
