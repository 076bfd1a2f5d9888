"""LMEvalModel: the model "sglang-dsl" of lm-evaluation-harness, over any backend. With a program, that
answers instead, and what is measured is the whole program.

    python -m sglang_dsl.integrations.lm_eval --model sglang-dsl --model_args backend=engine --tasks ...
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from runtime.protocol.messages import RAW_ROLE, Message
from sglang_dsl.concurrency.loop import background
from sglang_dsl.conversation.requests import Call, Prompt
from sglang_dsl.errors import BadProgram, Unsupported
from sglang_dsl.integrations.chat import Chat, message_of

T = TypeVar("T")
MOST_TOKENS = 256
"""Of an answer, where a task does not say: as lm-eval's other models have it."""
_ENDS = ("until", "max_gen_toks", "do_sample")


class Program(Protocol):
    """A program, as far as it is run here."""

    @property
    def signature(self) -> Any: ...
    def run_batch(self, batch_kwargs: Iterable[Any], **words: Any) -> Any: ...


class Conversation(str):
    """Turns, as JSON: what lm-eval hands back where it applies a chat template."""


@register_model("sglang-dsl")
class LMEvalModel(LM):  # type: ignore[misc, unused-ignore]
    """`backend`: what run's `backend=` takes, an Engine for example, or "engine"; None: the default backend.
    `timeout`: seconds a request may take. `num_concurrent`: how many requests may be under way at once.

    program    a program that answers in place of the model, or "module:name". Its argument `prompt` is the
               text that lm-eval made; other arguments are columns of the task's documents, by their names.
               A task's sampling words are defaults of its generations. Only for tasks of the output type
               generate_until: it scores no texts
    variable   the program's variable that is the answer

    Texts are scored by the backend's log-probabilities of prompts, which the bundled engine has. Raises
    BadProgram, NoBackend, BackendError.
    """

    def __init__(
        self,
        backend: Any = None,
        *,
        program: Program | str | None = None,
        variable: str = "answer",
        timeout: float | None = None,
        num_concurrent: int = 64,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ) -> None:
        """The last three are told by lm-eval to every model; an engine decides on its batches and device."""
        super().__init__()
        if type(num_concurrent) is not int or num_concurrent < 1:
            raise BadProgram(f"num_concurrent must be at least 1, got {num_concurrent!r}")
        self._chat = Chat("LMEvalModel", backend, timeout)
        self._program = _loaded(program) if isinstance(program, str) else program
        self._variable, self._concurrent = variable, num_concurrent

    # -- what lm-eval asks for -------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [(one.args[0], dict(one.args[1])) for one in requests]
        if self._program is not None:
            return self._answers(self._program, asked, [one.doc for one in requests])
        calls = [self._call(context, _words(said), _stops(said)) for context, said in asked]
        return self._all(self._text(call) for call in calls)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._scores_texts()
        return self._all(self._score(*one.args) for one in requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each of which has to fit into the model's context. The first token counts where the
        tokenizer puts one before it."""
        self._scores_texts()
        return [score for score, _ in self._all(self._score("", one.args[0]) for one in requests)]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> Conversation:
        """The turns as they are: the backend renders them with its checkpoint's own template."""
        if not add_generation_prompt:
            raise Unsupported("an assistant turn that lm-eval has begun cannot be continued")
        return Conversation(json.dumps(chat_history, ensure_ascii=False))

    @property
    def tokenizer_name(self) -> str:
        return self._chat.model

    # -- one request -----------------------------------------------------------------------------------------

    def _all(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """In order; the first that fails ends all."""

        async def bounded() -> list[T]:
            room = asyncio.Semaphore(self._concurrent)

            async def one(piece: Coroutine[Any, Any, T]) -> T:
                async with room:
                    return await piece

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(piece)) for piece in work]
            return [task.result() for task in tasks]

        try:
            return background().run(bounded())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _call(self, context: str, words: Mapping[str, Any], stops: list[str]) -> Call:
        said = {**words, "stop": stops or None}
        if isinstance(context, Conversation):
            return self._chat.call(json.loads(context), **said)
        return self._chat.completion(context, **said)

    async def _text(self, call: Call) -> str:
        return (await self._chat.answer(call)).texts[0]

    def _scores_texts(self) -> None:
        if self._program is not None:
            raise Unsupported("a program cannot score texts: use tasks of the output type generate_until")

    async def _score(self, context: str, continuation: str) -> tuple[float, bool]:
        """The log-probability of a text behind another, and whether the model would have said it."""
        before = await self._chat.backend.count_tokens(_prompt(context, ""))
        if before is None:
            raise Unsupported("the backend does not count tokens", backend=self._chat.backend.name)
        words = {"max_tokens": 1, "temperature": 0, "return_logprob": True, "top_logprobs_num": 1}
        call = self._chat.behind(_prompt(context, continuation), **words, logprob_start_len=before)
        meta = (await self._chat.answer(call)).meta
        tokens, best = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
        if tokens is None or best is None:
            raise Unsupported("the backend returns no log-probabilities of prompts")
        pairs = [(one, top) for one, top in zip(tokens, best, strict=True) if one[0] is not None]
        return sum(one[0] for one, _ in pairs), all(one[1] == top[0][1] for one, top in pairs)

    # -- programs --------------------------------------------------------------------------------------------

    def _answers(
        self, program: Program, asked: list[tuple[str, dict[str, Any]]], docs: list[Any]
    ) -> list[str]:
        names = [name for name in program.signature.parameters if name != "prompt"]
        takes_prompt = "prompt" in program.signature.parameters
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for index, (_, said) in enumerate(asked):
            groups.setdefault(json.dumps(_words(said), sort_keys=True), []).append(index)
        for words, indices in groups.items():
            items = [
                {name: docs[index][name] for name in names if name in docs[index]}
                | ({"prompt": str(asked[index][0])} if takes_prompt else {})
                for index in indices
            ]
            states = program.run_batch(
                items, backend=self._chat.backend, num_threads=self._concurrent, **json.loads(words)
            )
            for index, state in zip(indices, states, strict=True):
                answers[index] = _until(str(state[self._variable]), _stops(asked[index][1]))
        return [answers[index] for index in range(len(asked))]


def _prompt(context: str, continuation: str) -> Prompt:
    """What ends with `continuation`."""
    if not isinstance(context, Conversation):
        return Prompt((Message(RAW_ROLE, context + continuation, open=True),))
    turns = map(message_of, json.loads(context))
    return Prompt((*turns, Message("assistant", continuation, open=True)))


def _words(said: Mapping[str, Any]) -> dict[str, Any]:
    """A task's generation_kwargs as gen's keyword arguments."""
    words = {name: value for name, value in said.items() if name not in _ENDS}
    words["max_tokens"] = said.get("max_gen_toks", MOST_TOKENS)
    if not said.get("do_sample", words.get("temperature", 0) > 0):
        words["temperature"] = 0.0
    return words


def _stops(said: Mapping[str, Any]) -> list[str]:
    until = said.get("until") or []
    return [until] if isinstance(until, str) else [one for one in until if one]


def _until(text: str, stops: list[str]) -> str:
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _loaded(name: str) -> Program:
    """Raises BadProgram."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise BadProgram(f'program must be a program or "module:name", got {name!r:.80}')
    found: Program = getattr(importlib.import_module(module), attribute)
    return found


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
