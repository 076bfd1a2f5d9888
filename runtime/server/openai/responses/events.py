"""The events of a streamed response: those of the items of one generation, in their order."""

from __future__ import annotations

from typing import Any, Protocol

from runtime.formats.reply import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallDelta
from runtime.server.openai.responses.items import text_part
from runtime.server.openai.responses.step import Step


class MakeEvent(Protocol):
    def __call__(self, kind: str, **facts: Any) -> bytes: ...


class StepEvents:
    """event: makes an event of a type. offset: how many items the response has from generations before."""

    def __init__(self, step: Step, event: MakeEvent, offset: int) -> None:
        self._step, self._event, self._offset = step, event, offset
        self._places: dict[str, int] = {}  # item -> output_index

    def begin(self) -> list[bytes]:
        """What is known to come: a reply that may call need not say anything."""
        step, made = self._step, []
        if step.reasoning is not None:
            made += self._thought()
        return made if step.may_call or step.reply.may_reason else made + self._message()

    def _thought(self) -> list[bytes]:
        if "reasoning" in self._places:
            return []
        return self._open("reasoning", {**self._step.thought("", "in_progress"), "content": []})

    def place(self, item: dict[str, Any]) -> int:
        """Where an item of the finished generation stands."""
        kind = item["type"]
        if kind not in ("reasoning", "message"):
            kind = f"call {next(at for at, one in enumerate(self._step.calls) if one is item)}"
        return self._places.get(kind, self._offset + len(self._places))

    def _open(self, kind: str, item: dict[str, Any]) -> list[bytes]:
        place = self._places[kind] = self._offset + len(self._places)
        return [self._event("response.output_item.added", output_index=place, item=item)]

    def _message(self) -> list[bytes]:
        if "message" in self._places:
            return []
        made = self._open("message", {**self._step.said("", "in_progress"), "content": []})
        part = text_part("", ())
        return [*made, self._event("response.content_part.added", **self._at("message"), part=part)]

    def _at(self, kind: str) -> dict[str, Any]:
        identity = self._step.message_id if kind == "message" else self._step.thought_id
        return {"output_index": self._places[kind], "item_id": identity, "content_index": 0}

    def of(self, one: ReplyEvent) -> list[bytes]:
        step = self._step
        match one:
            case ReasoningDelta() if not step.shows_reasoning:
                return []
            case ReasoningDelta(text=text):
                begun = self._thought()
                delta = self._event("response.reasoning_text.delta", **self._at("reasoning"), delta=text)
                return [*begun, delta]
            case ContentDelta(text=text):
                new = step.new_logprobs()
                if not text and (step.may_call or step.reply.may_reason):
                    return []
                begun = self._message()
                told = {**self._at("message"), "delta": text, "logprobs": new}
                return [*begun, self._event("response.output_text.delta", **told)]
            case ToolCallDelta(index=number, name=name, arguments=text):
                begun = [] if name is None else self._call(number, name)
                deltas = _ARGUMENTS.get(step.calls[number]["type"])
                if not text or deltas is None:
                    return begun
                return [*begun, self._told(number, f"{deltas}.delta", delta=text)]
        raise TypeError(f"no event of a reply: {one!r}")

    def end(self) -> list[bytes]:
        """Each item as the model left it. Those of calls that are run here come to their end later."""
        step, made = self._step, []
        if not step.calls:
            made += self._message()
        items = {one["type"]: one for one in step.items()}
        for number in range(len(step.calls)):
            if f"call {number}" not in self._places:
                made += self._open(f"call {number}", step.calls[number])
        for kind, place in self._places.items():
            item = step.calls[int(kind[5:])] if kind.startswith("call ") else items[kind]
            match item["type"]:
                case "reasoning":
                    text = step.reply.reasoning or ""
                    made.append(self._event("response.reasoning_text.done", **self._at(kind), text=text))
                case "message":
                    [part] = item["content"]
                    told = {"text": part["text"], "logprobs": part["logprobs"]}
                    made.append(self._event("response.output_text.done", **self._at(kind), **told))
                    made.append(self._event("response.content_part.done", **self._at(kind), part=part))
                case _:
                    made += self._arguments(int(kind[5:]))
                    if item["status"] == "in_progress":
                        continue
            made.append(self._event("response.output_item.done", output_index=place, item=item))
        return made

    # -- calls -----------------------------------------------------------------------------------------------

    def _told(self, number: int, kind: str, **facts: Any) -> bytes:
        """An event of a call."""
        place = {"output_index": self._places[f"call {number}"], "item_id": self._step.calls[number]["id"]}
        return self._event(f"response.{kind}", **place, **facts)

    def _call(self, number: int, name: str) -> list[bytes]:
        item = self._step.call(number, name)
        begun = self._open(f"call {number}", item)
        if item["type"] == "function_call":
            return begun
        return [*begun, self._told(number, f"{item['type']}.in_progress")]

    def _arguments(self, number: int) -> list[bytes]:
        """They are whole."""
        item = self._step.calls[number]
        match item["type"]:
            case "function_call":
                told = {"arguments": item["arguments"], "name": item["name"]}
                return [self._told(number, "function_call_arguments.done", **told)]
            case "mcp_call":
                return [self._told(number, "mcp_call_arguments.done", arguments=item["arguments"])]
            case "code_interpreter_call":
                code = item["code"]
                return [
                    self._told(number, "code_interpreter_call_code.delta", delta=code),
                    self._told(number, "code_interpreter_call_code.done", code=code),
                ]
        return []

    def runs(self, number: int) -> list[bytes]:
        """A call is about to be run."""
        kind = self._step.calls[number]["type"]
        return [self._told(number, f"{kind}.{_RUNS[kind]}")] if kind in _RUNS else []

    def ran(self, number: int) -> list[bytes]:
        """A call has been run."""
        item = self._step.calls[number]
        failed = item["type"] == "mcp_call" and item["status"] == "failed"
        return [
            self._told(number, f"{item['type']}.{'failed' if failed else 'completed'}"),
            self._done(number),
        ]

    def left_out(self) -> list[bytes]:
        """Calls that are not run have ended."""
        return [self._done(number) for number in self._step.left_out]

    def _done(self, number: int) -> bytes:
        place, item = self._places[f"call {number}"], self._step.calls[number]
        return self._event("response.output_item.done", output_index=place, item=item)


_ARGUMENTS = {"function_call": "function_call_arguments", "mcp_call": "mcp_call_arguments"}
"""Items whose arguments are told in pieces."""
_RUNS = {"code_interpreter_call": "interpreting", "web_search_call": "searching"}
"""What is said when a call is run, where there is an event of it."""
