"""CTranslate2: its Generator over one batch; what all prompts begin with is given as its static prompt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ctranslate2
from adapter import Unsupported, common_begin, serve


def export(folder: Path) -> Path:
    """The checkpoint in its format, made once; tokens are named by their number."""
    target = folder.with_name(f"{folder.name}-ctranslate2")
    if target.exists():
        return target
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.converters import transformers as loaders

    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]

    class Numbers(loaders.LlamaLoader):  # type: ignore[misc]
        def get_vocabulary(self, model: object, tokenizer: object) -> list[str]:
            return [str(number) for number in range(vocab)]

        def set_config(self, config: object, model: object, tokenizer: object) -> None:
            config.bos_token = config.unk_token = "0"  # type: ignore[attr-defined]
            config.eos_token = "255"  # type: ignore[attr-defined]
            config.layer_norm_epsilon = model.config.rms_norm_eps  # type: ignore[attr-defined]

    for name in list(loaders._MODEL_LOADERS):
        if isinstance(loaders._MODEL_LOADERS[name], loaders.LlamaLoader):
            loaders._MODEL_LOADERS[name] = Numbers()
    source = folder.with_name(f"{folder.name}-ctranslate2-source")
    shutil.copytree(folder, source, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    if "rope_parameters" in config:  # transformers 5 writes it so, transformers 4 reads the older field
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    TransformersConverter(str(source)).convert(str(target))
    return target


class CTranslate2:
    shares = True

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        kinds = ctranslate2.get_supported_compute_types("cpu")
        if precision not in kinds:
            raise Unsupported(f"no {precision} on this CPU: {', '.join(sorted(kinds))}")
        self._generator = ctranslate2.Generator(
            str(export(folder)), compute_type=precision, inter_threads=1, intra_threads=threads
        )
        self.version = f"{ctranslate2.__version__}, one batch, static prompt"

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        words = [[str(token) for token in prompt] for prompt in prompts]
        common = words[0][: common_begin(prompts)]
        outs = self._generator.generate_batch(
            [word[len(common) :] for word in words],
            static_prompt=common or None, cache_static_prompt=False, include_prompt_in_result=False,
            max_length=new_tokens, min_length=new_tokens, beam_size=1, sampling_topk=1,
        )  # fmt: skip
        return [out.sequences_ids[0] for out in outs]

    def forget(self) -> None:
        """It keeps nothing between calls."""


if __name__ == "__main__":
    serve(CTranslate2)
