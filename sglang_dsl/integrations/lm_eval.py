"""LMEvalModel: the model "sglang-dsl" of lm-evaluation-harness, over any backend, or a program in place of
the model.

    python -m sglang_dsl.integrations.lm_eval --model sglang-dsl --model_args backend=engine --tasks ...
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from runtime.protocol.messages import RAW_ROLE, Message
from sglang_dsl.concurrency.loop import background
from sglang_dsl.conversation.requests import Prompt
from sglang_dsl.errors import BadProgram, Unsupported
from sglang_dsl.integrations.chat import Chat, message_of

T = TypeVar("T")
MAX_TOKENS = 256
"""The limit of an answer if the task has none, as in lm-eval's other models."""


class Conversation(str):
    """Turns as JSON: what lm-eval sends after it has applied a chat template."""


@register_model("sglang-dsl")
class LMEvalModel(LM):  # type: ignore[misc, unused-ignore]
    """`backend`: what run's `backend=` takes, an Engine for example, or "engine"; None: the default backend.
    `timeout`: seconds per request. `num_concurrent`: the most requests at once.

    program    a program that answers in place of the model, or "module:name". Its argument `prompt` is
               lm-eval's text; other arguments are columns of the task's documents. A task's sampling
               parameters are defaults of its generations. Only for tasks of the output type
               generate_until, as it scores no texts
    variable   the program's variable that is the answer

    Texts are scored by log-probabilities of prompts, which the bundled engine returns. Raises BadProgram,
    NoBackend, BackendError.
    """

    def __init__(
        self,
        backend: Any = None,
        *,
        program: Any = None,
        variable: str = "answer",
        timeout: float | None = None,
        num_concurrent: int = 64,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ) -> None:
        """lm-eval passes the last three to every model; they have no effect here."""
        super().__init__()
        if type(num_concurrent) is not int or num_concurrent < 1:
            raise BadProgram(f"num_concurrent must be at least 1, got {num_concurrent!r}")
        self._chat = Chat("LMEvalModel", backend, timeout)
        if isinstance(program, str):
            module, _, attribute = program.partition(":")
            if not module or not attribute:
                raise BadProgram(f'program must be a program or "module:name", got {program!r:.80}')
            program = getattr(importlib.import_module(module), attribute)
        self._program = program
        self._variable, self._concurrent = variable, num_concurrent

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        if self._program is not None:
            return self._run_program(requests)
        return self._all(self._text(*one.args) for one in requests)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._check_scoring()
        return self._all(self._score(*one.args) for one in requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts, each of which must fit into the model's context. The first token counts if the
        tokenizer adds one before it."""
        self._check_scoring()
        return [score for score, _ in self._all(self._score("", one.args[0]) for one in requests)]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> Conversation:
        """Keeps the turns, which the backend renders with its checkpoint's template."""
        if not add_generation_prompt:
            raise Unsupported("an assistant turn that lm-eval has begun cannot be continued")
        return Conversation(json.dumps(chat_history, ensure_ascii=False))

    @property
    def tokenizer_name(self) -> str:
        return self._chat.model

    def _all(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """The results in order. The first failure cancels the rest."""

        async def bounded() -> list[T]:
            slots = asyncio.Semaphore(self._concurrent)

            async def one(piece: Coroutine[Any, Any, T]) -> T:
                async with slots:
                    return await piece

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(piece)) for piece in work]
            return [task.result() for task in tasks]

        try:
            return background().run(bounded())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _text(self, context: str, task: Mapping[str, Any]) -> str:
        options = {**_options(task), "stop": _stops(task) or None}
        call = self._chat.completion(_prompt(context, ""), **options)
        return (await self._chat.answer(call)).texts[0]

    def _check_scoring(self) -> None:
        if self._program is not None:
            raise Unsupported("a program cannot score texts: use tasks of the output type generate_until")

    async def _score(self, context: str, continuation: str) -> tuple[float, bool]:
        """The log-probability of a text after another, and whether greedy decoding generates it."""
        before = await self._chat.backend.count_tokens(_prompt(context, ""))
        if before is None:
            raise Unsupported("the backend does not count tokens", backend=self._chat.backend.name)
        options = {"max_tokens": 1, "temperature": 0, "return_logprob": True, "top_logprobs_num": 1}
        call = self._chat.completion(_prompt(context, continuation), **options, logprob_start_len=before)
        meta = (await self._chat.answer(call)).meta
        tokens, best = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
        if tokens is None or best is None:
            raise Unsupported("the backend returns no log-probabilities of prompts")
        pairs = [(one, top) for one, top in zip(tokens, best, strict=True) if one[0] is not None]
        return sum(one[0] for one, _ in pairs), all(one[1] == top[0][1] for one, top in pairs)

    def _run_program(self, requests: list[Any]) -> list[str]:
        """The program's answers, in a batch for all requests with the same options."""
        assert self._program is not None
        parameters = self._program.signature.parameters
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for index, one in enumerate(requests):
            groups.setdefault(json.dumps(_options(one.args[1]), sort_keys=True), []).append(index)
        for options, indices in groups.items():
            items = []
            for one in (requests[index] for index in indices):
                columns = {**one.doc, "prompt": str(one.args[0])}
                items.append({name: columns[name] for name in parameters if name in columns})
            states = self._program.run_batch(
                items, backend=self._chat.backend, num_threads=self._concurrent, **json.loads(options)
            )
            for index, state in zip(indices, states, strict=True):
                text = str(state[self._variable])
                ends = [text.find(stop) for stop in _stops(requests[index].args[1]) if stop in text]
                answers[index] = text[: min(ends, default=len(text))]
        return [answers[index] for index in range(len(requests))]


def _prompt(context: str, continuation: str) -> Prompt:
    if not isinstance(context, Conversation):
        return Prompt((Message(RAW_ROLE, context + continuation, open=True),))
    turns = map(message_of, json.loads(context))
    return Prompt((*turns, Message("assistant", continuation, open=True)))


def _options(task: Mapping[str, Any]) -> dict[str, Any]:
    """A task's generation_kwargs as gen's keyword arguments, without stop conditions."""
    options = dict(task)
    options.pop("until", None)
    options["max_tokens"] = options.pop("max_gen_toks", MAX_TOKENS)
    if not options.pop("do_sample", options.get("temperature", 0) > 0):
        options["temperature"] = 0.0
    return options


def _stops(task: Mapping[str, Any]) -> list[str]:
    until = task.get("until") or []
    return [until] if isinstance(until, str) else [one for one in until if one]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
