"""ONNX Runtime GenAI: its Generator over one batch, of a model that its own builder has exported. int8 is the
builder's: weights in 8 bits, activations quantised as they come. It shares no prefixes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
from adapter import Unsupported, serve

MOST = 32
"""It takes no larger batch."""


def export(folder: Path, precision: str, threads: int) -> Path:
    """The checkpoint as an ONNX graph, made once; a copy of its settings with that many threads."""
    if precision == "bfloat16":
        raise Unsupported("no bfloat16 on the CPU")
    target = folder.with_name(f"{folder.name}-onnxruntime-{precision}")
    if not (target / "genai_config.json").exists():
        from transformers import PreTrainedTokenizerFast

        source = folder.with_name(f"{folder.name}-onnxruntime-source")
        shutil.copytree(folder, source, dirs_exist_ok=True)
        PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).save_pretrained(source)
        made, cache = target.with_suffix(".part"), target.with_suffix(".cache")
        kind = {"float32": ["fp32"], "int8": ["int8", "--extra_options", "accuracy_level=4"]}[precision]
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", made]
        subprocess.run([*command, "-e", "cpu", "-c", cache, "-p", *kind], check=True)
        shutil.rmtree(cache, ignore_errors=True)
        made.rename(target)
    file = target / "genai_config.json"
    config = json.loads(file.read_text())
    options = config["model"]["decoder"]["session_options"]
    options["intra_op_num_threads"] = threads
    config["search"]["past_present_share_buffer"] = True
    config["model"]["eos_token_id"] = 255
    file.write_text(json.dumps(config, indent=1))
    return target


class OnnxRuntime:
    shares = False

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        self._model = genai.Model(str(export(folder, precision, threads)))
        self.version = f"{genai.__version__}, one batch"

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        if len(prompts) > MOST:
            return self.run(prompts[:MOST], new_tokens) + self.run(prompts[MOST:], new_tokens)
        params = genai.GeneratorParams(self._model)
        length = len(prompts[0]) + new_tokens
        params.set_search_options(
            batch_size=len(prompts), max_length=length, min_length=length, do_sample=False
        )
        generator = genai.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        begin = len(prompts[0])
        return [generator.get_sequence(row)[begin:].tolist() for row in range(len(prompts))]

    def forget(self) -> None:
        """It keeps nothing between calls."""


if __name__ == "__main__":
    serve(OnnxRuntime)
