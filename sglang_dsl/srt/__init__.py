"""The few helpers that programs of the language import from sglang's server package, under its module names.
Holds no code of its own: each module names where a thing lives here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsl.lang import modules_of

if TYPE_CHECKING:
    from sglang_dsl.srt import constrained as constrained
    from sglang_dsl.srt import hf_transformers_utils as hf_transformers_utils
    from sglang_dsl.srt import utils as utils
else:
    __getattr__ = modules_of(__name__)
