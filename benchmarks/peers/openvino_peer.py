"""OpenVINO GenAI: its continuous batching pipeline with prefix caching, of a model that optimum-intel has
exported. int8 is weights in 8 bits with activations quantised as they come, which is its default there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from adapter import Unsupported, serve

CACHE_GB = 2


def export(folder: Path, precision: str) -> Path:
    """The checkpoint as OpenVINO's files, made once."""
    kind = "int8" if precision == "int8" else "float32"
    target = folder.with_name(f"{folder.name}-openvino-{kind}")
    if (target / "openvino_tokenizer.xml").exists():
        return target
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import PreTrainedTokenizerFast

    small = OVWeightQuantizationConfig(bits=8) if kind == "int8" else None
    options: dict[str, Any] = {"quantization_config": small} if small else {"load_in_8bit": False}
    if not (target / "openvino_model.xml").exists():
        made = OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, **options)
        made.save_pretrained(target)
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if not words["model"]["merges"]:  # its converter takes no tokenizer without any, or without special ones
        words["model"]["vocab"]["ab"] = len(words["model"]["vocab"])
        words["model"]["merges"] = [["a", "b"]]
        off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        words["added_tokens"] = [{"id": 257, "content": "<|end|>", "special": True, **off}]
    (target / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    fast = PreTrainedTokenizerFast(tokenizer_file=str(target / "tokenizer.json"))
    there, back = convert_tokenizer(fast, with_detokenizer=True)
    openvino.save_model(back, target / "openvino_detokenizer.xml")
    openvino.save_model(there, target / "openvino_tokenizer.xml")
    return target


class OpenVINO:
    shares = True

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        target = export(folder, precision)
        plan = genai.SchedulerConfig()
        plan.cache_size = CACHE_GB
        plan.enable_prefix_caching = True
        plan.max_num_batched_tokens = 4096
        plan.max_num_seqs = 256
        hints = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
            "KV_CACHE_PRECISION": "bf16" if precision == "bfloat16" else "f32",
        }
        try:
            self._load: Any = lambda: genai.ContinuousBatchingPipeline(str(target), plan, "CPU", hints)
            self._pipe = self._load()
        except RuntimeError as error:
            raise Unsupported(f"{precision}: {error}") from error
        self._used = False
        self._waiting: dict[int, Any] = {}
        self._tokenizer = self._pipe.get_tokenizer()
        self.version = f"{genai.__version__.split('-')[0]}, continuous batching, prefix cache"

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        self._used = True
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        outs = self._pipe.generate(ids, [self._config(new_tokens, None)] * len(ids))
        return [list(out.m_generation_ids[0]) for out in outs]

    def forget(self) -> None:
        """It has no call for that: the pipeline is made again."""
        if self._used:
            del self._pipe
            self._pipe = self._load()
            self._tokenizer = self._pipe.get_tokenizer()
        self._used = False

    def add(self, number: int, prompt: str, new_tokens: int, regex: str | None) -> None:
        self._used = True
        self._waiting[number] = self._pipe.add_request(number, prompt, self._config(new_tokens, regex))

    def step(self) -> dict[int, str]:
        self._pipe.step()
        done = [
            number
            for number, handle in self._waiting.items()
            if handle.get_status() == genai.GenerationStatus.FINISHED
        ]
        handles = {number: self._waiting.pop(number) for number in done}
        return {
            number: self._tokenizer.decode(list(handle.read_all()[0].generated_ids))
            for number, handle in handles.items()
        }

    def _config(self, new_tokens: int, regex: str | None) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.do_sample = False
        config.eos_token_id = -1
        config.ignore_eos = regex is None
        if regex is not None:
            config.set_eos_token_id(self._tokenizer.get_eos_token_id())
            config.structured_output_config = genai.StructuredOutputConfig(regex=regex)
        return config


if __name__ == "__main__":
    serve(OpenVINO)
