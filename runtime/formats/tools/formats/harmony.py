"""gpt-oss: the channels of harmony. Calls are messages to a recipient; reasoning (analysis) is skipped here,
the final channel is content. Source: https://cookbook.openai.com/articles/openai-harmony"""

from __future__ import annotations

import re
from collections.abc import Sequence

from runtime.formats.tools.base import BaseFormatDetector, CallSink
from runtime.formats.tools.named_calls import LONGEST_NAME, arguments
from runtime.formats.tools.reader import Malformed, Reader, Reading
from runtime.formats.tools.types import Call, StructureInfo
from runtime.formats.tools.values import JSON, text_of

_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MESSAGE = "<|message|>"
_MANY_ENDS = re.compile("(?:" + "|".join(map(re.escape, _ENDS)) + ")*")
_RECIPIENT = re.compile(r"to=([\w.\-]+)")


class Harmony(BaseFormatDetector):
    triggers = (*_STARTS, *_ENDS)

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        if trigger in _STARTS:
            header = trigger + (yield from reader.until((_MESSAGE,), LONGEST_NAME))
            reader.take(len(_MESSAGE))
            recipient = _RECIPIENT.search(header)
            if recipient is not None:
                calls.begin(recipient[1].rpartition(".")[2])
                yield from arguments(reader, JSON, calls.arguments)
                calls.commit()
                if (yield from reader.follows(_ENDS)):
                    yield from reader.follows(("commentary",))
            elif "analysis" in header:
                yield from self._skip(reader)
        else:
            run = _MANY_ENDS.match(reader.text, reader.at)
            if run is not None:
                trigger = reader.take(run.end() - run.start()) or trigger
            if trigger.endswith("<|call|>"):
                yield from reader.follows(("commentary",))
        reader.reset()

    def _skip(self, reader: Reader) -> Reading[None]:
        """Skip the rest of a message."""
        try:
            yield from reader.until((*_STARTS, *_ENDS))
        except Malformed:
            reader.take(reader.left)

    def render(self, calls: Sequence[Call]) -> str:
        return "".join(
            f"<|start|>assistant<|channel|>commentary to=functions.{call.name} <|constrain|>json{_MESSAGE}"
            f"{text_of(dict(call.arguments))}<|call|>"
            for call in calls
        )

    def auto_trigger(self) -> str | None:
        return "<|channel|>commentary to="

    around = ("", "<|start|>assistant", "")

    def structure_info(self, name: str) -> StructureInfo | None:
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json{_MESSAGE}"
        return StructureInfo(head, "<|call|>", "<|channel|>commentary to=")


GPT_OSS = Harmony()
