"""SpeculationConfig: whether and how tokens are drafted and verified together. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.config.checkpoints import find_checkpoint
from runtime.config.encoder import read_spec
from runtime.config.model import ModelSpec
from runtime.protocol.errors import BadRequest, ModelLoadError
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

    @classmethod
    def of(
        cls,
        algorithm: str | None,
        *,
        model: str | None,
        steps: int | None,
        tokens: int | None,
        min_match: int,
        max_match: int,
    ) -> SpeculationConfig:
        """From the options of those names. `tokens`: verified in one step, including the certain one;
        `steps`: of the draft model, one per draft. Raises BadRequest naming the option."""
        name = None if algorithm is None else algorithm.upper()
        if name is None:
            for option, value in (("draft_model_path", model), ("num_steps", steps)):
                if value is not None:
                    raise BadRequest(
                        "has no effect without speculative_algorithm",
                        where=f"speculative_{option}",
                        hint="--speculative-algorithm STANDALONE",
                    )
            return cls()
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
            option = "draft_model_path" if model is not None else "num_steps"
            raise BadRequest("NGRAM has no draft model", where=f"speculative_{option}", hint="leave it out")
        if tokens is not None and not 2 <= tokens <= 128:
            raise BadRequest(f"must be in 2 to 128, got {tokens}", where="speculative_num_draft_tokens")
        if steps is not None and not 1 <= steps <= 127:
            raise BadRequest(f"must be in 1 to 127, got {steps}", where="speculative_num_steps")
        if steps is not None and tokens is not None and steps != tokens - 1:
            raise BadRequest(
                f"must be speculative_num_draft_tokens - 1 = {tokens - 1}, got {steps}",
                where="speculative_num_steps",
            )
        if not 1 <= min_match <= max_match <= 64:
            raise BadRequest(
                f"must be in 1 to speculative_ngram_max_match_window_size, and that at most 64, got "
                f"{min_match} and {max_match}",
                where="speculative_ngram_min_match_window_size",
            )
        drafts = steps if tokens is None else tokens - 1
        return cls(name, drafts or DEFAULT_DRAFTS[name], min_match, max_match)


NO_SPECULATION = SpeculationConfig()


def draft_spec(spec: ModelSpec, where: str) -> tuple[Path, ModelSpec]:
    """The checkpoint at `where`, and its shape. Raises ModelLoadError if it cannot draft for a model like
    `spec`."""
    folder = find_checkpoint(where)
    small = read_spec(folder)
    if not isinstance(small, ModelSpec):
        raise ModelLoadError("a draft model must be a decoder, this is an encoder", where=where)
    if small.vocab_size != spec.vocab_size:
        raise ModelLoadError(
            f"the draft model has {small.vocab_size} ids, the model {spec.vocab_size}",
            where=where,
            hint="they must share their vocabulary: take one of the same family",
        )
    return folder, small
