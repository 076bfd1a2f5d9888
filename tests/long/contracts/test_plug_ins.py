"""A stranger's package of one file adds an attention implementation, a schedule or router policy, a chat
template, a grammar backend, a KV transfer or a remote backend; each is found by its name, in a process that
has only installed it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ATTENTION = '''
import torch
from runtime.attention.base import Attention
from runtime.attention.pool import KVPool

class PerLayer(KVPool):
    """Slots of one layer side by side, another layout than any of the built-in ones."""
    def __init__(self, shape, slots):
        size = (shape.layers, slots, 2 * shape.kv_heads, shape.head_dim)
        self.of_layer = torch.empty(size, dtype=shape.dtype, device=shape.device)
        super().__init__(self.of_layer.transpose(0, 1))

class Gathered(Attention):
    def make_pool(self, shape, slots):
        print("pool made by", __name__, flush=True)
        return PerLayer(shape, slots)

    def begin(self, plan):
        rows, first = [], 0
        for index, row in enumerate(plan.rows):
            mine = sorted((one for one in plan.segments if index in one.rows), key=lambda one: one.position)
            runs = [*(run for one in mine for run in one.runs), *row.slots]
            slots = torch.tensor([slot for start, length in runs for slot in range(start, start + length)])
            rows.append((first, first + len(row.tokens), row.position, slots))
            first += len(row.tokens)

        def attend(layer, qkv):
            out, pool = [], self.pool.of_layer[layer]
            for first, last, position, slots in rows:
                pool[slots[position:]] = qkv[first:last, self.heads :]
                query = qkv[first:last, : self.heads].transpose(0, 1)
                key, value = pool[slots].transpose(0, 1).repeat_interleave(self.group, 0).chunk(2)
                seen = torch.ones(last - first, len(slots), dtype=torch.bool).tril(position)
                made = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen)
                out.append(made.transpose(0, 1).flatten(1))
            return torch.cat(out)

        return attend
'''
WITH_ATTENTION = """
from runtime.api import Engine

def ask(name):
    with Engine("pocket", attention=name, runner_process=PROCESS) as engine:
        prompts = ["Q: Which river runs through Ostrel?\\nA:", "Q: Which river", "one two three"]
        words = {"temperature": 0.0, "max_new_tokens": 24}
        return [list(out.output_ids) for out in engine.generate(prompts * 2, words)]

if __name__ == "__main__":
    assert ask("gathered") == ask("auto")
"""

POLICY = """
def order(waiting):
    return sorted(waiting, key=lambda candidate: candidate.new_tokens)
"""
WITH_POLICY = """
from runtime.api import Engine

if __name__ == "__main__":
    lengths = [40, 30, 6, 18]
    with Engine("pocket", schedule_policy="briefest", max_running_requests=1) as engine:
        params = [{"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True} for n in lengths]
        outs = engine.generate([f"Request {n}:" for n in lengths], params)
    took = {n: out.meta["e2e_latency"] for n, out in zip(lengths, outs)}
    # The first one may be running before the others arrive.
    assert sorted(took, key=took.get) in ([6, 18, 30, 40], [40, 6, 18, 30]), took
"""

TEMPLATE = """
from sglang_dsl.lang.chat_template import ChatTemplate

BRACKETS = ChatTemplate("brackets", None, {
    "system": ("[sys ", "]"), "user": ("[you ", "]"), "assistant": ("[me ", "]"),
}, ("]",))
"""
WITH_TEMPLATE = """
import sglang_dsl as sgl
from sglang_dsl.lang.chat_template import get_chat_template

@sgl.function
def ask(s):
    s += sgl.user("Hello!")
    s += sgl.assistant(sgl.gen("reply", max_tokens=8, temperature=0))

if __name__ == "__main__":
    assert get_chat_template("brackets").name == "brackets"
    with sgl.Engine("pocket", chat_template="brackets") as engine:
        assert engine.chat_template.name == "brackets"
        words = {"temperature": 0.0, "max_new_tokens": 8}
        by_hand = engine.generate("[you Hello!][me ", {**words, "stop": "]"})
        state = ask.run(backend=engine)
        assert state["reply"] == by_hand.text
        assert state.get_meta_info("reply")["prompt_tokens"] == by_hand.meta["prompt_tokens"]
"""

GRAMMAR = '''
import numpy as np
from runtime.grammar.base import GrammarBackend, Matcher, Origin
from runtime.plan import TokenMask
from runtime.protocol.errors import UnsupportedConstraint

class Options(Matcher):
    """One of a list of texts."""
    origin = Origin("listed")

    def __init__(self, vocabulary, options, steps=(b"",), ended=False):
        self.vocabulary, self.options, self.steps, self.ended = vocabulary, options, list(steps), ended

    def advance(self, token):
        if token in self.vocabulary.eos:
            self.ended = self.may_stop()
            return self.ended
        return self.advance_bytes(self.vocabulary.tokens[token])

    def advance_bytes(self, data):
        text = self.steps[-1] + data
        fits = bool(data) and any(option.startswith(text) for option in self.options)
        if fits:
            self.steps.append(text)
        return fits

    def mask(self):
        ids = [token for token in range(len(self.vocabulary)) if self.copy().advance(token)]
        flags = np.zeros(-(-len(self.vocabulary) // 32) * 32, dtype=bool)
        flags[ids] = True
        return TokenMask(np.packbits(flags, bitorder="little").view(np.uint32), np.array(ids))

    def forced_bytes(self):
        return b""

    def may_stop(self):
        return self.steps[-1] in self.options

    def is_terminated(self):
        return self.ended or (self.may_stop() and not any(map(self.next_of, self.options)))

    def next_of(self, option):
        return option.startswith(self.steps[-1]) and option != self.steps[-1]

    def rollback(self, steps):
        del self.steps[len(self.steps) - steps :]

    def copy(self):
        return Options(self.vocabulary, self.options, self.steps, self.ended)

class Listed(GrammarBackend):
    name = "listed"

    def compile(self, constraint):
        if constraint.kind != "regex" or set("+*(.[") & set(constraint.spec):
            raise UnsupportedConstraint("only lists of texts are kept", where=constraint.kind)
        return Options(self.vocabulary, constraint.spec.encode().split(b"|"))
'''
WITH_GRAMMAR = """
import sglang_dsl as sgl

@sgl.function
def ask(s, **how):
    s += "The bird is a" + sgl.gen("bird", max_tokens=30, **how)

if __name__ == "__main__":
    birds = [" green woodpecker", " grey heron", " great egret", "n owl"]
    with sgl.Engine("pocket", grammar_backend="listed", disable_jump_forward=False) as engine:
        for seed in range(8):
            bird = ask.run(backend=engine, regex="|".join(birds), temperature=1.5, seed=seed)["bird"]
            assert bird in birds, bird
        try:
            ask.run(backend=engine, regex="[a-z]+")["bird"]
        except Exception as error:
            assert "only lists of texts are kept" in str(error), error
        else:
            raise SystemExit("the regex was taken")
"""

BACKEND = '''
import asyncio
import json
import os
import urllib.request
from sglang_dsl.backends.base import Backend, ChoiceScore, ChoiceScores, Completion, Delta

class Shouter(Backend):
    """A service that speaks a protocol of its own."""
    name = "shouter"

    async def generate(self, call):
        prompt = "".join(str(message.content) for message in call.prompt.messages)
        asked = urllib.request.Request(os.environ["SHOUTER"], prompt.encode())
        answer = await asyncio.to_thread(lambda: urllib.request.urlopen(asked, timeout=300).read())
        return Completion((answer.decode(),) * call.n, {"finish_reason": {"type": "stop"}})

    async def stream(self, call):
        whole = await self.generate(call)
        for character in whole.texts[0]:
            yield Delta(character)
        yield Delta("", meta=whole.meta)

    async def score(self, call):
        return ChoiceScores(tuple(ChoiceScore((-float(len(choice)),)) for choice in call.choices))
'''
WITH_BACKEND = """
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
import sglang_dsl as sgl

class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        prompt = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(prompt.upper())

    def log_message(self, *said):
        pass

@sgl.function
def ask(s, word):
    s += sgl.user(word)
    s += sgl.assistant(sgl.gen("reply"))
    s += sgl.assistant(sgl.select("pick", ["long one", "one"]))

if __name__ == "__main__":
    service = HTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    os.environ["SHOUTER"] = f"http://127.0.0.1:{service.server_port}/"
    state = ask.run("hello", backend="shouter")
    assert (state["reply"], state["pick"]) == ("HELLO", "one"), state.text()
    streamed = ask.run("hello", backend="shouter", stream=True)
    assert "".join(streamed.text_iter("reply")) == "HELLO"
    states = ask.run_batch([{"word": word} for word in ("a", "b", "c")], backend="shouter")
    assert [one["reply"] for one in states] == ["A", "B", "C"]
"""

ROUTER_POLICY = """
class Last:
    def __init__(self, options):
        self.forgotten = []

    def choose(self, prompt, candidates):
        return candidates[-1]

    def forget(self, name):
        self.forgotten.append(name)
"""
WITH_ROUTER_POLICY = """
from runtime.config.serving.router import RouterConfig
from runtime.server.router.app import Router
from runtime.server.router.pool import RequestFacts

if __name__ == "__main__":
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"]
    [pool] = Router(RouterConfig.of({"worker": urls, "policy": "last"})).pools
    for worker in pool.workers[:2]:
        worker.is_ready()
    assert [pool.choose(RequestFacts(b"one")).worker.name for _ in range(3)] == [urls[1]] * 3
"""

TRANSFER = """
from runtime.disagg.transfer.tcp import TcpManager

class Counted(TcpManager):
    name = "counted"
    dialled = 0

    def dial(self, address):
        Counted.dialled += 1
        return super().dial(address)
"""
WITH_TRANSFER = """
import time
from runtime.disagg.transfer.kv_manager import KVPoll
from runtime.disagg.transfer.bootstrap import BootstrapServer
from runtime.disagg.transfer.memory import KVLayout, make_memory
from runtime.disagg.transfer.metadata import Metadata
from runtime.disagg.transfer.kv_manager import KV_TRANSFERS
from runtime.plan import Run

def until(end, poll):
    deadline = time.monotonic() + 100
    while end.poll() is not poll:
        assert time.monotonic() < deadline and end.poll() is not KVPoll.Failed, end.failure()
        time.sleep(0.001)

if __name__ == "__main__":
    kind = KV_TRANSFERS.load("counted")
    pools = [make_memory(8, KVLayout(1, 1, 8, "float32", 0, 1)) for _ in range(2)]
    pools[0].view[...] = 7
    prefill, decode = map(kind, pools)
    server = BootstrapServer()
    prefill.listen(server.address)
    sender, receiver = prefill.sender(5), decode.receiver(server.address, 5)
    until(receiver, KVPoll.WaitingForInput)
    receiver.init([Run(2, 3)], 0)
    until(sender, KVPoll.WaitingForInput)
    sender.init(3)
    sender.send([Run(0, 3)], Metadata(output_ids=(1,)))
    until(receiver, KVPoll.Success)
    assert (pools[1].view[2:5] == 7).all() and kind.dialled == 3
    prefill.close(); decode.close(); server.close()
"""

CASES = {
    "kv.transfer": ("counted", "Counted", TRANSFER, WITH_TRANSFER),
    "attention": ("gathered", "Gathered", ATTENTION, WITH_ATTENTION.replace("PROCESS", "False")),
    "attention in a process": ("gathered", "Gathered", ATTENTION, WITH_ATTENTION.replace("PROCESS", "True")),
    "schedule.policy": ("briefest", "order", POLICY, WITH_POLICY),
    "chat.template": ("brackets", "BRACKETS", TEMPLATE, WITH_TEMPLATE),
    "grammar.backend": ("listed", "Listed", GRAMMAR, WITH_GRAMMAR),
    "router.policy": ("last", "Last", ROUTER_POLICY, WITH_ROUTER_POLICY),
    "backend": ("shouter", "Shouter", BACKEND, WITH_BACKEND),
}


@pytest.mark.parametrize("kind", list(CASES))
def test_a_strangers_file_is_found_by_its_name(tmp_path: Path, kind: str) -> None:
    name, target, module, program = CASES[kind]
    (tmp_path / "stranger.py").write_text(module)
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    group = f"sglang_dsl.{kind.partition(' ')[0]}"
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = stranger:{target}\n")
    (tmp_path / "program.py").write_text(program)
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(tmp_path)))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if kind.startswith("attention"):
        assert "pool made by stranger" in done.stdout + done.stderr
