"""What programs written for sglang import besides the language: modules under its names, the regex of a
model, options of its server, words of its metas.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import sglang_dsl as sgl
from runtime.config.flags import read_options
from runtime.protocol import server_names
from runtime.protocol.errors import BadRequest, NotSupported
from runtime.protocol.server_names import IDLE
from sglang_dsl.backends.base import Call, ChoiceCall, ChoiceScore, ChoiceScores, Completion
from sglang_dsl.console.server_options import runtime_options
from sglang_dsl.errors import BadProgram, Unsupported
from sglang_dsl.ir.schema_regex import build_regex_from_object, regex_of_schema
from sglang_dsl.launch_server import flags_of, runtime_flags
from sglang_dsl.sglang_modules import names_in, stub_of
from sglang_dsl.utils import launch_server_cmd, terminate_process, wait_for_server
from tests.exploring import tries

ROOT = Path(__file__).parents[3]
IMPORTED = """
api: set_default_backend gen select function system user assistant flush_cache get_server_info Runtime
lang.api: function gen gen_int gen_string select set_default_backend image Runtime RuntimeEndpoint
lang.ir: REGEX_INT REGEX_FLOAT REGEX_BOOL REGEX_STR SglRoleBegin SglRoleEnd SglGen
lang.ir: SglSamplingParams SglFunction SglSelect SglExprList SglSeparateReasoning
lang.chat_template: ChatTemplate get_chat_template register_chat_template get_chat_template_by_model_path
lang.chat_template: register_chat_template_matching_function
lang.interpreter: ProgramState ProgramStateGroup StreamExecutor
lang.choices: token_length_normalized greedy_token_selection unconditional_likelihood_normalized
lang.choices: ChoicesSamplingMethod ChoicesDecision
lang.backend.runtime_endpoint: RuntimeEndpoint Runtime
lang.backend.openai: OpenAI
lang.backend.anthropic: Anthropic
lang.backend.vertexai: VertexAI
lang.backend.litellm: LiteLLM
lang.backend.crusoe: Crusoe
lang.backend.base_backend: BaseBackend
global_config: global_config
test.test_utils: add_common_sglang_args_and_parse select_sglang_backend add_common_other_args_and_parse
test.test_utils: dump_bench_raw_result is_in_ci
test.doc_patch: launch_server_cmd
lang.global_config: global_config
utils: http_request read_jsonl dump_state_text download_and_cache_file print_highlight launch_server_cmd
utils: wait_for_server terminate_process normalize_base_url trim_overlap stream_and_merge
utils: async_stream_and_merge execute_shell_command
launch_server: main
srt.constrained: build_regex_from_object
srt.constrained.outlines_backend: build_regex_from_object
srt.hf_transformers_utils: get_tokenizer
srt.utils.hf_transformers_utils: get_tokenizer
srt.utils: load_image
"""


@pytest.mark.parametrize("line", IMPORTED.strip().splitlines())
def test_programs_find_what_they_import(line: str) -> None:
    module, _, names = line.partition(": ")
    found = importlib.import_module(f"sglang_dsl.{module}")
    for name in names.split():
        assert getattr(found, name) is not None


STUBS = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in (ROOT / "sglang_dsl").rglob("*.pyi")
    if file.stem != "static_types"
}


def declared(stub: Path) -> list[str]:
    """The names in a stub's __all__."""
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            return list(ast.literal_eval(node.value))
    return []


@pytest.mark.parametrize("module", STUBS)
def test_a_module_has_the_names_of_its_stub(module: str) -> None:
    assert stub_of(module) == str(STUBS[module])
    imported, names = importlib.import_module(module), names_in(stub_of(module))
    assert sorted(names) == sorted(imported.__all__) == sorted(declared(STUBS[module]))
    for name, (source, attribute) in names.items():
        assert getattr(imported, name) is getattr(importlib.import_module(source), attribute)


def test_a_module_of_names_runs_and_does_nothing() -> None:
    command = [sys.executable, "-W", "error", "-m", "sglang_dsl.lang.ir"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_picture_without_pillow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.protocol.registry import MissingExtra
    from sglang_dsl.srt.utils import load_image

    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match="pip install pillow"):
        load_image(b"no picture")


# -- the regex of a model ------------------------------------------------------------------------------------


class Weapon(str, Enum):  # noqa: UP042 - as programs write it
    sword = "sword"
    axe = "battle axe"


class Staff(BaseModel):
    wood: str
    length: float


class Wizard(BaseModel):
    name: str
    age: int
    alive: bool
    weapon: Weapon
    staff: Staff
    spells: list[str]
    master: str | None = None


def test_the_regex_of_a_model() -> None:
    merlin = {
        "name": 'Mer"lin', "age": -812, "alive": True, "weapon": "battle axe",
        "staff": {"wood": "oak", "length": 1.5}, "spells": ["a", "b"], "master": None,
    }  # fmt: skip
    regex = re.compile(build_regex_from_object(Wizard))
    for text in (json.dumps(merlin), json.dumps(merlin, separators=(",", ":"))):
        assert regex.fullmatch(text)
        assert Wizard.model_validate_json(text)
    for wrong in (
        {**merlin, "age": "1"},
        {**merlin, "weapon": "bow"},
        {"name": "x"},
        {**merlin, "staff": {}},
    ):
        assert not regex.fullmatch(json.dumps(wrong))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "pattern": "a+"}, "'pattern'"),
        ({"type": "integer", "minimum": 3}, "'minimum'"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "b"]}, "b is required"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, "itself"),
        ({"$ref": "#/$defs/b"}, "does not exist"),
        ({"type": "array"}, "any value"),
        ("{", "not JSON"),
        (3, "a schema is"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_no_regex_says_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(BadProgram, match=re.escape(place)):
        build_regex_from_object(schema)


SCALARS = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "boolean", "null"])}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True)
    ),
    st.builds(lambda value: {"const": value}, st.integers() | st.text(max_size=3) | st.none()),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(
            lambda properties: {"type": "object", "properties": properties, "required": list(properties)},
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
        ),
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


def instance(schema: dict[str, Any], draw: st.DrawFn) -> Any:
    match schema:
        case {"enum": values}:
            return draw(st.sampled_from(values))
        case {"const": value}:
            return value
        case {"anyOf": options}:
            return instance(draw(st.sampled_from(options)), draw)
        case {"type": "object", "properties": properties}:
            return {name: instance(inner, draw) for name, inner in properties.items()}
        case {"type": "array", "items": items, "minItems": low, "maxItems": high}:
            return [instance(items, draw) for _ in range(draw(st.integers(low, high)))]
        case {"type": "string"}:
            return draw(
                st.text(min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 4))
                .filter(lambda text: not re.search(r"[\x00-\x07\x0b\x0e-\x1f]", text))
            )  # fmt: skip
        case {"type": "integer"}:
            return draw(st.integers())
        case {"type": "number"}:
            return draw(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
        case {"type": "boolean"}:
            return draw(st.booleans())
        case _:
            return None


@st.composite
def schema_and_instance(draw: st.DrawFn) -> tuple[dict[str, Any], Any]:
    schema = draw(SCHEMAS)
    return schema, instance(schema, draw)


@settings(max_examples=tries(60))
@given(schema_and_instance())
def test_the_regex_takes_what_the_schema_describes(case: tuple[dict[str, Any], Any]) -> None:
    schema, value = case
    jsonschema.validate(value, schema)
    text = json.dumps(value, ensure_ascii=False)
    assert re.fullmatch(regex_of_schema(schema), text), text


# -- options of a server -------------------------------------------------------------------------------------


def test_options_of_its_server() -> None:
    given = {"tp_size": 1, "trust_remote_code": True, "mem_fraction_static": 0.5, "disable_radix_cache": True}
    assert runtime_options({**given, "page_size": 2}) == {
        "tp_size": 1, "memory_fraction": 0.5, "radix_cache": False, "page_size": 2,
    }  # fmt: skip
    with pytest.raises(Unsupported, match="pp_size=2"):
        runtime_options({"pp_size": 2})
    with pytest.raises(Unsupported, match="pp_size=2"):
        sgl.Runtime(model_path="pocket", pp_size=2)


def test_flags_of_its_server() -> None:
    words = ["--model-path", "pocket", "--tp=1", "--disable-radix-cache", "--mem-fraction-static", "0.4"]
    assert runtime_flags([*words, "--trust-remote-code", "--page-size", "4"]) == [
        "--model-path", "pocket", "--page-size", "4", "--tp-size", "1", "--no-radix-cache",
        "--memory-fraction", "0.4",
    ]  # fmt: skip


COMMANDS = {
    "--model-path m --host 0.0.0.0 --port 30000": ("--model-path m --host 0.0.0.0 --port 30000", ""),
    "--model-path m --tp 1 --dp-size 1 --trust-remote-code --disable-cuda-graph --dtype auto": (
        "--model-path m --dtype auto --tp-size 1 --no-cuda-graph", "",
    ),
    "--model m --pp 2 --dp=4": ("--model m", "pp=2, dp=4"),
    "--tensor-parallel-size 2 --mem-fraction-static 0.6": ("--tp-size 2 --memory-fraction 0.6", ""),
    "--reasoning-parser qwen3 --log-level critical": ("--reasoning-parser qwen3 --log-level error", ""),
    "--reasoning-parser deepseek-r1": ("--reasoning-parser deepseek-r1", ""),
    "--reasoning-parser gpt-oss": ("--reasoning-parser gpt-oss", ""),
    "--reasoning-parser not-known-yet --seed 3": ("--seed 3", "default_reasoning_parser=not-known-yet"),
    "--dtype half --grammar-backend xgrammar": ("--grammar-backend xgrammar", "dtype=half"),
    "--dtype float": ("--dtype float32", ""),
    "--chunked-prefill-size -1 --context-length 512": ("--context-length 512", "chunked_prefill_size=-1"),
    "--chunked-prefill-size 512": ("--chunked-prefill-size 512", ""),
    "--attention-backend flashinfer --sampling-backend=pytorch": (
        "", "attention_backend=flashinfer, sampling_backend=pytorch",
    ),
    "--attention-backend triton --cuda-graph-max-bs 64": ("--attention triton --cuda-graph-max-bs 64", ""),
    "--cuda-graph-bs 1 2 4 --lora-paths a=b c=d --enable-metrics": (
        "--lora-paths a=b c=d --enable-metrics", "cuda_graph_bs=1 2 4",
    ),
    "--speculative-algorithm EAGLE --speculative-num-steps 3": (
        "", "speculative_algorithm=EAGLE, speculative_num_steps=3",
    ),
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8 --speculative-ngram-capacity 9": (
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8", "speculative_ngram_capacity=9",
    ),
    "--tool-call-parser qwen25 --chat-template chatml": (
        "--tool-call-parser qwen25 --chat-template chatml", "",
    ),
    "--schedule-policy lpm --schedule-conservativeness 0.8 --random-seed 4": (
        "--schedule-policy lpm --conservativeness 0.8 --seed 4", "",
    ),
    "--enable-priority-scheduling --constrained-json-disable-any-whitespace": (
        "--schedule-policy priority --grammar-whitespace compact", "",
    ),
    "--max-running-requests 8 --max-queued-requests 9 --api-key k --served-model-name n": (
        "--max-running-requests 8 --api-key k --served-model-name n --max-waiting-requests 9", "",
    ),
    "--log-requests --skip-server-warmup --is-embedding --kv-cache-dtype fp8_e5m2 --quantization fp8": (
        "--kv-cache-dtype fp8_e5m2 --quantization fp8", "log_requests=True",
    ),
    "--page-size 4 --no-such-flag 3": ("--page-size 4 --no-such-flag 3", ""),
}  # fmt: skip


@pytest.mark.parametrize("said", COMMANDS)
def test_a_command_line_of_its_server_is_taken(said: str) -> None:
    wanted, idle = COMMANDS[said]
    told: list[str] = []
    made = runtime_flags(flags_of(f"python3 -m sglang.launch_server \\\n  {said}"), told.append)
    assert sorted(" ".join(made).split()) == sorted(wanted.split())
    assert told == ([f"without effect on the bundled runtime: {idle}"] if idle else [])
    known = [word for word in made if word.startswith("--") and word != "--no-such-flag"]
    if "--no-such-flag" not in made:
        read_options([*made, "--model", "pocket"], {})  # each of them is an option of `serve`
    assert known == [word for word in known if word[2:].replace("-", "_") not in IDLE]


def test_a_command_in_several_lines_is_one_command() -> None:
    command = """python3 -m sglang.launch_server --model-path m \\
      --host 127.0.0.1 \\
      --chat-template "a b.jinja" """
    assert flags_of(command) == ["--model-path", "m", "--host", "127.0.0.1", "--chat-template", "a b.jinja"]


def test_what_only_speeds_up_another_engine_is_taken_by_a_runtime_and_an_engine() -> None:
    for make in (runtime_options, server_names.runtime_options):
        with pytest.warns(UserWarning, match="without effect.*attention_backend=fa3, cuda_graph_bs=8"):
            assert make({"attention_backend": "fa3", "cuda_graph_bs": 8, "page_size": 2}) == {"page_size": 2}
        assert make({"attention_backend": None, "log_requests": False}) == {}


def test_what_changes_answers_is_refused_by_a_runtime_and_an_engine_and_named_by_a_command() -> None:
    with pytest.raises(NotSupported, match="modelopt_quant"):
        server_names.runtime_options({"modelopt_quant": "fp8"})
    with pytest.raises(Unsupported, match="json_model_override_args"):
        runtime_options({"json_model_override_args": '{"rope_theta": 1}'})
    assert runtime_options({"modelopt_quant": None, "json_model_override_args": "{}"}) == {}
    told: list[str] = []
    assert runtime_flags(["--modelopt-quant", "a", "b", "--port", "1"], told.append) == ["--port", "1"]
    assert told == ["without effect on the bundled runtime: modelopt_quant=a b"]


def test_adapters_are_named_as_in_programs_for_it() -> None:
    objects = [{"lora_name": "a", "lora_path": "b"}, "c=d"]
    for named in ({"a": "b", "c": "d"}, ["a=b", "c=d"], objects):
        assert server_names.runtime_options({"lora_paths": named}) == {"lora_paths": ("a=b", "c=d")}
    assert server_names.runtime_options({"lora_paths": None}) == {"lora_paths": ()}
    with pytest.raises(NotSupported, match="pinned"):
        server_names.runtime_options({"lora_paths": [{"lora_name": "a", "lora_path": "b", "pinned": True}]})


def test_a_server_is_started_by_the_command_that_programs_have(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="dp=2"):
        process, port = launch_server_cmd(
            "python3 -m sglang.launch_server --model-path pocket \\\n --host 127.0.0.1 --dp 2 "
            "--mem-fraction-static 0.2 --reasoning-parser qwen3 --max-total-tokens 2048 --log-level error"
        )
    try:
        wait_for_server(f"http://127.0.0.1:{port}", process=process)
        state = sgl.function(lambda s: s.__iadd__("Hello" + sgl.gen("x", max_tokens=3))).run(
            backend=sgl.RuntimeEndpoint(f"http://127.0.0.1:{port}")
        )
        assert isinstance(state["x"], str)
    finally:
        terminate_process(process)
    done = subprocess.run(
        [sys.executable, "-m", "sglang_dsl.launch_server", "--model-path", "/nowhere", "--dp", "2"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.startswith("warning: without effect on the bundled runtime: dp=2\nerror: /nowhere")
    assert done.stderr.count("\n") == 2


def test_the_tokenizer_may_be_named_where_it_is_the_checkpoints() -> None:
    given = {"tokenizer_path": "pocket", "random_seed": 3, "disable_overlap_schedule": True}
    assert runtime_options(given, "pocket") == {"seed": 3, "overlap": False}
    assert runtime_options({"tokenizer_path": None, "revision": None}) == {}
    for words in (["--model-path", "pocket"], ["--model=pocket"]):
        assert runtime_flags([*words, "--tokenizer-path", "pocket"]) == words
        with pytest.raises(Unsupported, match="put its files there"):
            runtime_flags([*words, "--tokenizer-path", "other"])
    with pytest.raises(Unsupported, match="put its files there"):
        sgl.Runtime(model_path="pocket", tokenizer_path="other")


def test_an_engine_and_its_arguments_take_the_same_names() -> None:
    given = {"mem_fraction_static": 0.5, "tp_size": 1, "trust_remote_code": True, "random_seed": 3}
    args = sgl.ServerArgs(model_path="pocket", **given)
    assert dict(args) == {"model_path": "pocket", "memory_fraction": 0.5, "tp_size": 1, "seed": 3}
    assert dict(sgl.ServerArgs(tensor_parallel_size=2)) == {"model_path": "pocket", "tp_size": 2}
    with pytest.raises(BadRequest, match="pp_size=2"):
        sgl.ServerArgs(model_path="pocket", pp_size=2)
    with pytest.raises(BadRequest, match="revision='main'"):
        sgl.Engine(model_path="pocket", revision="main", random_seed=3)


# -- words of its states and metas ---------------------------------------------------------------------------


def test_offsets_of_forks_have_no_effect() -> None:
    @sgl.function
    def program(s):
        s += "a"
        forks = s.fork(2, [0, 1000])
        forks += lambda i: f"{i}"
        forks.join("concate_and_append")
        with s.copy(position_ids_offset=[5]) as other:
            other["x"] = 1

    state = program.run(backend=sgl.MockBackend())
    assert state.text() == "a01"
    assert state["x"] == [1]

    @sgl.function
    def wrong(s):
        s.fork(2, position_ids_offset=[0])

    with pytest.raises(BadProgram, match="1 offsets for 2 forks"):
        wrong.run(backend=sgl.MockBackend())


def test_the_function_of_a_program() -> None:
    def plain(s: Any) -> None: ...

    assert sgl.function(plain).func is plain


class Peeked(sgl.MockBackend):
    """Knows what could come next."""

    async def generate(self, call: Call) -> Completion:
        self.calls.append(call)
        meta = {"output_top_logprobs": [[[-0.1, 5, "a"], [-2.5, 6, "b"]]], "completion_tokens": 1}
        return Completion(("a",), meta)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_no_tokens_with_log_probabilities_tell_what_could_come_next(stream: bool) -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("next", max_tokens=0, return_logprob=True, top_logprobs_num=2) + "y"

    backend = Peeked()
    state = program.run(backend=backend, stream=stream)
    assert "".join(state.text_iter()) == "xy"
    assert state["next"] == ""
    assert [one[2] for one in state.get_meta_info("next")["output_top_logprobs"][0]] == ["a", "b"]
    assert backend.calls[0].sampling.max_new_tokens == 1


def test_no_tokens_without_log_probabilities_ask_for_none() -> None:
    backend = sgl.MockBackend(["a"])
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("x", max_tokens=0))).run(backend=backend)
    assert state["x"] == ""
    assert backend.calls[0].sampling.max_new_tokens == 0


class Scored(sgl.MockBackend):
    """Gives ids with its scores."""

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        return ChoiceScores(
            (ChoiceScore((-1.0, -3.0), (7, 8), (None, -1.0)), ChoiceScore((0.0,), (9,), (-2.0,)))
        )


@pytest.mark.parametrize(
    "method",
    [sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized],
)
def test_metas_of_choices(method: Any) -> None:
    program = sgl.function(lambda s: s.__iadd__("q" + sgl.select("x", ["ab", "c"], choices_method=method)))
    state = program.run(backend=Scored())
    meta = state.get_meta_info("x")
    assert meta["input_token_logprobs"] == [[[-1.0, 7, None], [-3.0, 8, None]], [[0.0, 9, None]]]
    assert meta["normalized_prompt_logprobs"] == [-2.0, 0.0]
    assert len(meta["output_token_logprobs"]) == 2
    assert ("greedy_logprob_matrix" in meta) == (method is sgl.greedy_token_selection)
    if method is sgl.greedy_token_selection:
        assert meta["greedy_logprob_matrix"] == [[-1.0, -3.0], [0.0, 0.0]]
    if method is sgl.unconditional_likelihood_normalized:
        assert meta["unconditional_token_logprobs"] == [[[None, 7, None], [-1.0, 8, None]], [[-2.0, 9, None]]]
        assert meta["normalized_unconditional_prompt_logprobs"] == [-1.5, 2.0]
    assert state["x"] == "c"
    assert state.choice("x").options == ("ab", "c")


def test_tokens_used_are_counted_by_backend() -> None:
    backend = sgl.MockBackend(["one two three"] * 2)
    program = sgl.function(lambda s: s.__iadd__("a b" + sgl.gen("x")))
    program.run(backend=backend).sync()
    assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (2, 3)
    backend.token_usage.reset()
    assert backend.token_usage.prompt_tokens == 0


def test_modules_are_there_without_an_import_of_their_own() -> None:
    read = """
import sglang_dsl as sgl
print(sgl.utils.stream_and_merge, sgl.backends, sgl.errors, sgl.hooks.subscribe, sgl.integrations)
print(sgl.lang.chat_template.get_chat_template, sgl.lang.ir.REGEX_INT)
print(sgl.lang.backend.openai.SglSamplingParams)
print(sgl.srt.hf_transformers_utils.get_config, sgl.srt.utils.hf_transformers_utils, sgl.test.test_utils)
print(sgl.srt.constrained.outlines_backend, *[hasattr(one, "nothing") for one in (sgl, sgl.lang, sgl.srt)])
"""
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" False False False\n")


def test_the_configuration_of_a_checkpoint() -> None:
    get_config = sgl.srt.hf_transformers_utils.get_config
    assert get_config("pocket").vocab_size > 1000
    assert get_config("pocket", model_override_args={"vocab_size": 7}).vocab_size == 7
