"""A variable's JSON as values while it is generated. Knows one variable, no nodes and no backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runtime.formats.json_stream import JsonStream, JsonStreamError
from sglang_dsl.errors import InvalidValue
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir.growing import NOTHING, Growing


class Reading:
    """One reader of a variable: takes its pieces in order and yields the values to show."""

    def __init__(self, variable: Variable, strings: bool) -> None:
        self._variable = variable
        self._typed = variable.typed
        self._stream = JsonStream(strings=strings)
        # A node that was read back from JSON has no type any more: it shows plain data.
        read = self._typed is not None and self._typed.adapter is not None
        self._growing = Growing(self._typed.annotation) if self._typed is not None and read else None
        # Where the text is no JSON there is nothing to show before its end.
        self._is_json = self._typed is None or self._typed.kind == "json"

    def take(self, piece: str) -> Iterator[Any]:
        """The value after one more piece, if it shows more than before."""
        if not self._is_json or isinstance(self._variable.raw, list):
            return
        try:
            grown = self._stream.feed(piece)
        except JsonStreamError:
            self._is_json = False  # told at the end, where it is known what else went wrong
            return
        if grown and (shown := self._shown()) is not NOTHING:
            yield shown

    def end(self) -> Iterator[Any]:
        """The complete value. Raises ProgramError: the variable's own error, or the text is not JSON."""
        value = self._variable.result()
        if self._typed is not None or isinstance(self._variable.raw, list):
            yield value
            return
        try:
            grown = self._stream.close()
        except JsonStreamError as error:
            raise self._broken(error) from error
        if grown:
            yield self._shown()

    def _shown(self) -> Any:
        value, growing = self._stream.value, self._growing
        return value if growing is None else growing.value(value, self._stream.writing)

    def _broken(self, error: JsonStreamError) -> InvalidValue:
        cut = (self._variable.meta.get("finish_reason") or {}).get("type") == "length"
        return InvalidValue(
            f"the text is not JSON: {error}",
            variable=self._variable.name,
            hint="it was cut off: increase max_tokens" if cut else None,
        )
