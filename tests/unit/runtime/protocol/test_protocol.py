"""What is spoken between the rooms: ranges, and errors that survive a wire."""

from __future__ import annotations

import math

import msgspec
import pytest

from runtime.protocol import errors
from runtime.protocol.constraint import MAX_SPEC_BYTES, Constraint
from runtime.protocol.sampling import MAX_STOPS, SamplingParams

WRONG = [
    ("max_new_tokens", -1),
    ("min_new_tokens", 129),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", 0),
    ("top_k", -2),
    ("min_p", 1.5),
    ("frequency_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("stop", ("",)),
    ("stop", tuple("x" * n for n in range(1, MAX_STOPS + 2))),
    ("stop_token_ids", (-1,)),
    ("seed", -1),
    ("seed", 2**63),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(errors.BadRequest) as caught:
        SamplingParams(**{name: value}).verify()  # type: ignore[arg-type]
    assert caught.value.where == f"sampling_params.{name}"
    assert name in str(caught.value)


def test_defaults_are_in_range() -> None:
    assert SamplingParams().verify() == SamplingParams()
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams().greedy


@pytest.mark.parametrize("kind", [errors.BY_CODE[code] for code in sorted(errors.BY_CODE)])
def test_errors_survive_a_wire(kind: type[errors.RuntimeFault]) -> None:
    fault = kind("what went wrong", where="field", hint="do this")
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(fault.to_dict()))
    back = errors.from_dict(wire)
    assert type(back) is kind
    assert str(back) == str(fault) == "field: what went wrong (do this)"
    assert 400 <= back.status < 600


def test_every_fault_has_a_code_of_its_own() -> None:
    def below(kind: type[errors.RuntimeFault]) -> set[type[errors.RuntimeFault]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    # A room above may refine a fault; on the wire it is the fault it refines.
    own = {kind for kind in below(errors.RuntimeFault) if kind.__module__ == errors.__name__}
    assert own == set(errors.BY_CODE.values())
    assert all(kind.code in errors.BY_CODE for kind in below(errors.RuntimeFault))
    assert type(errors.from_dict({"code": "from the future", "message": "x"})) is errors.RuntimeFault


@pytest.mark.parametrize("spec", ["", "a" * (MAX_SPEC_BYTES + 1)])
def test_constraints_have_a_size(spec: str) -> None:
    with pytest.raises(errors.BadConstraint) as caught:
        Constraint("regex", spec).verify()
    assert caught.value.where == "regex"
