"""unit/runtime/grammar/masks/test_properties_masks.py, at length."""

from __future__ import annotations

import random

import pytest

from tests.exploring import SLOW_EXAMPLES
from tests.unit.runtime.grammar import drawn
from tests.unit.runtime.grammar.drawn import VOCABULARIES
from tests.unit.runtime.grammar.drawn_cases import PAIRS, pair_id
from tests.unit.runtime.grammar.masks.test_properties_masks import masks_hold, run

pytestmark = pytest.mark.drawn


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("words", VOCABULARIES)
@pytest.mark.parametrize(("case", "name"), PAIRS, ids=pair_id)
def test_a_thousand_walks_finish_and_validate(case, name, words):
    run(case, name, words, SLOW_EXAMPLES, 40)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("words", ["awkward", "pocket", "trained"])
@pytest.mark.parametrize(("case", "name"), PAIRS, ids=pair_id)
def test_masks_equal_brute_force_in_many_places(case, name, words):
    masks_hold(case, name, words, max(1, SLOW_EXAMPLES // 16), random.Random(drawn.SEED))
