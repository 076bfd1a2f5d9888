from sglang_dsl.choices import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

__all__ = [
    "ChoicesDecision", "ChoicesSamplingMethod", "greedy_token_selection", "token_length_normalized",
    "unconditional_likelihood_normalized",
]  # fmt: skip
