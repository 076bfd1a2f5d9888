"""Where programs written for sglang import their command-line helpers from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsl.lang import modules_of

if TYPE_CHECKING:
    from sglang_dsl.test import doc_patch as doc_patch
    from sglang_dsl.test import test_utils as test_utils
else:
    __getattr__ = modules_of(__name__)
