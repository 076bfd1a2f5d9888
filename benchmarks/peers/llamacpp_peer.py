"""llama.cpp through llama-cpp-python: batches of several sequences, the common begin of the prompts computed
once and copied to the others (`seq_cp`), as its server's authors advise. int8 is q8_0."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from adapter import common_begin, serve

SLOTS = 64
ROWS = 2048


def export(folder: Path, precision: str) -> Path:
    """The checkpoint as GGUF, made once."""
    import gguf

    target = folder.with_name(f"{folder.name}-{precision}.gguf")
    if target.exists():
        return target
    from gguf import quants
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    part = target.with_suffix(".part")
    out = gguf.GGUFWriter(part, "llama")
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(groups)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    out.add_rope_freq_base(theta)
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("llama")
    out.add_token_list([f"<{number}>".encode() for number in range(config["vocab_size"])])
    out.add_token_scores([0.0] * config["vocab_size"])
    out.add_token_types([int(gguf.TokenType.NORMAL)] * config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    kinds = {
        "float32": gguf.GGMLQuantizationType.F32,
        "bfloat16": gguf.GGMLQuantizationType.BF16,
        "int8": gguf.GGMLQuantizationType.Q8_0,
    }
    for name, array in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # ggml's rotary takes pairs side by side
            count = heads if "q_proj" in name else groups
            rows, columns = array.shape
            array = array.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        mine = names.get_name(name, try_suffixes=(".weight",))
        assert mine is not None, name
        kind = kinds[precision] if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        if kind == gguf.GGMLQuantizationType.F32:
            out.add_tensor(mine, array)
        else:
            out.add_tensor(mine, quants.quantize(array, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    part.rename(target)
    return target


class LlamaCpp:
    shares = True

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        file = export(folder, precision)
        self._model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        words = llama_cpp.llama_context_default_params()
        words.n_ctx, words.n_batch, words.n_ubatch, words.n_seq_max = 24_576, ROWS, 512, SLOTS
        words.n_threads = words.n_threads_batch = threads
        words.kv_unified = True
        if precision != "bfloat16":
            kind = llama_cpp.GGML_TYPE_F32 if precision == "float32" else llama_cpp.GGML_TYPE_F16
            words.type_k = words.type_v = kind
        self._context = llama_cpp.llama_init_from_model(self._model, words)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(ROWS, 0, 1)
        self.version = f"llama-cpp-python {llama_cpp.__version__}, sequences in one batch"

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        common = common_begin(prompts)
        if common:
            self._decode([(0, place, token, False) for place, token in enumerate(prompts[0][:common])])
            for number in range(1, len(prompts)):
                llama_cpp.llama_memory_seq_cp(self._memory, 0, number, 0, common)
        rows = [
            (number, place, prompt[place], place + 1 == len(prompt))
            for number, prompt in enumerate(prompts)
            for place in range(common, len(prompt))
        ]
        out = [[token] for _, token in sorted(self._decode(rows).items())]
        for step in range(1, new_tokens):
            rows = [(n, len(p) + step - 1, out[n][-1], True) for n, p in enumerate(prompts)]
            for number, token in self._decode(rows).items():
                out[number].append(token)
        llama_cpp.llama_memory_clear(self._memory, False)
        return out

    def forget(self) -> None:
        """Each call leaves an empty cache."""

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Rows (sequence, position, token, whether to sample) -> the sampled tokens by sequence."""
        found: dict[int, int] = {}
        batch: Any = self._batch
        for begin in range(0, len(rows), ROWS):
            part = rows[begin : begin + ROWS]
            batch.n_tokens = len(part)
            for row, (number, place, token, sampled) in enumerate(part):
                batch.token[row], batch.pos[row] = token, place
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, number
                batch.logits[row] = sampled
            if llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            for row, (number, _, _, sampled) in enumerate(part):
                if sampled:
                    scores = llama_cpp.llama_get_logits_ith(self._context, row)
                    view = np.ctypeslib.as_array(
                        ctypes.cast(scores, ctypes.POINTER(ctypes.c_float)), (self._vocab,)
                    )
                    found[number] = int(view.argmax())
        return found


if __name__ == "__main__":
    serve(LlamaCpp)
