"""Which template a model writes: by checkpoint, by name, or an error that names the ways to choose."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.formats.chat import (
    UnknownChatTemplate,
    get_chat_template_by_model_path,
    match_checkpoint,
    matching,
    register_chat_template_matching_function,
)
from runtime.formats.chat.families import FAMILIES
from runtime.formats.chat.matching import match_model_path, model_name
from runtime.formats.chat.registry import BUILT_IN
from runtime.protocol.errors import TemplateError

DATA = Path(__file__).parent / "data"

WELL_KNOWN: dict[str, str] = {
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek-v3.1",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "deepseek-r1-distill",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "deepseek-r1-distill",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "deepseek-r1-distill",
    "deepseek-ai/DeepSeek-V2-Chat": "deepseek-v2",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2",
    "deepseek-ai/DeepSeek-V2.5": "deepseek-v2",
    "deepseek-ai/DeepSeek-V3.1-Terminus": "deepseek-v3.1",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.1",
    "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct": "deepseek-v2",
    "deepseek-ai/deepseek-llm-7b-chat": "deepseek-v2",
    "deepseek-ai/DeepSeek-Coder-V2-Instruct": "deepseek-v2",
    "deepseek-ai/Janus-Pro-7B": "janus-pro",
    "OrionStarAI/Orion-14B-Chat": "claude",
    "databricks/dbrx-instruct": "dbrx-instruct",
    "lmsys/vicuna-7b-v1.5": "vicuna_v1.1",
    "liuhaotian/llava-v1.5-7b": "vicuna_v1.1",
    "lmms-lab/LLaVA-NeXT-Video-7B": "vicuna_v1.1",
    "lmms-lab/LLaVA-NeXT-Video-34B": "chatml-llava",
    "liuhaotian/llava-v1.6-34b": "chatml-llava",
    "lmms-lab/llava-onevision-qwen2-7b-ov": "chatml-llava",
    "lmms-lab/llama3-llava-next-8b": "llama-3-instruct-llava",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-chat",
    "codellama/CodeLlama-34b-Instruct-hf": "llama-2-chat",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-instruct",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3-instruct",
    "meta-llama/Llama-3.2-11B-Vision-Instruct": "llama-3-instruct",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3-instruct",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama-4",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "llama-4",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistral",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral-v3-tekken",
    "mistralai/Mistral-Large-Instruct-2411": "mistral-v7",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": "mistral-v7-tekken",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-v7-tekken",
    "mistralai/Pixtral-12B-2409": "mistral",
    "mistralai/Magistral-Small-2506": "magistral",
    "mistralai/Ministral-8B-Instruct-2410": "mistral-v3-tekken",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "mistral-v7-tekken",
    "mistralai/Devstral-Small-2505": "mistral-v7-tekken",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "qwen3",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "qwen3",
    "Qwen/QwQ-32B": "qwq",
    "Qwen/Qwen2.5-7B-Instruct": "qwen",
    "Qwen/Qwen2-VL-7B-Instruct": "qwen2-vl",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2-vl",
    "Qwen/Qwen-7B-Chat": "qwen",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": "qwen3",
    "Qwen/Qwen3-VL-8B-Instruct": "qwen2-vl",
    "Qwen/CodeQwen1.5-7B-Chat": "qwen",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "chatml",
    "THUDM/glm-4v-9b": "glm-4v",
    "zai-org/GLM-4.5V": "glm-4v",
    "THUDM/glm-4-9b-chat": "glm-4",
    "zai-org/GLM-4.5": "glm-4.5",
    "zai-org/GLM-4.5-Air": "glm-4.5",
    "zai-org/GLM-4.6": "glm-4.5",
    "zai-org/GLM-4.7": "glm-4.7",
    "zai-org/GLM-4.7-Flash": "glm-4.7",
    "zai-org/GLM-4.6V": "glm-4v",
    "THUDM/GLM-4-32B-0414": "glm-4",
    "THUDM/GLM-Z1-32B-0414": "glm-4",
    "01-ai/Yi-34B-Chat": "yi",
    "01-ai/Yi-1.5-9B-Chat": "yi-1.5",
    "01-ai/Yi-VL-6B": "yi-vl",
    "01-ai/Yi-Coder-9B-Chat": "yi",
    "google/gemma-2-9b-it": "gemma-it",
    "google/gemma-3-4b-it": "gemma-3-it",
    # What it really reads; "gemma-4-it" is the format known under that name (see the family's file).
    "google/gemma-4-31B-it": "gemma-4",
    "google/gemma-4-E4B-it": "gemma-4",
    "google/gemma-3n-E4B-it": "gemma-3-it",
    "google/medgemma-4b-it": "gemma-3-it",
    "google/codegemma-7b-it": "gemma-it",
    "openbmb/MiniCPM-V-2_6": "minicpmv",
    "openbmb/MiniCPM-o-2_6": "minicpmo",
    "CohereForAI/c4ai-command-r-v01": "c4ai-command-r",
    "CohereForAI/c4ai-command-r-plus": "c4ai-command-r",
    "CohereForAI/c4ai-command-r7b-12-2024": "command-a",
    "CohereLabs/c4ai-command-a-03-2025": "command-a",
    "ibm-granite/granite-3.1-8b-instruct": "granite-3-instruct",
    "ibm-granite/granite-4.0-h-small": "granite-4",
    "ibm-granite/granite-4.0-micro": "granite-4",
    "OpenGVLab/InternVL2_5-8B": "internvl-2-5",
    "OpenGVLab/InternVL3-8B": "internvl3",
    "OpenGVLab/InternVL3_5-8B": "internvl3",
    "internlm/Intern-S1": "interns1",
    "internlm/interns1-mini": "interns1",
    "openai/gpt-oss-20b": "gpt-oss",
    "openai/gpt-oss-120b": "gpt-oss",
    "microsoft/Phi-3-mini-4k-instruct": "phi-3.5",
    "microsoft/Phi-3.5-mini-instruct": "phi-3.5",
    "microsoft/phi-4": "phi-4",
    "microsoft/Phi-4-mini-instruct": "phi-4-mini",
    "microsoft/Phi-4-reasoning-plus": "phi-4",
    "microsoft/Phi-4-multimodal-instruct": "phi-4-mini",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2",
    "moonshotai/Kimi-K2-Thinking": "kimi-k2-thinking",
    "moonshotai/Kimi-K2-Instruct-0905": "kimi-k2",
    "MiniMaxAI/MiniMax-M2": "minimax-m2",
    "MiniMaxAI/MiniMax-M2.1": "minimax-m2",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "smollm2",
    "HuggingFaceTB/SmolLM3-3B": "smollm3",
    "allenai/OLMo-2-1124-7B-Instruct": "olmo-2",
    "allenai/OLMo-2-1124-13B-DPO": "olmo-2",
    "NousResearch/Hermes-3-Llama-3.1-8B": "hermes-3",
    "NousResearch/Hermes-2-Pro-Mistral-7B": "chatml",
    "teknium/OpenHermes-2.5-Mistral-7B": "chatml",
    "baichuan-inc/Baichuan2-13B-Chat": "baichuan2",
    "xai-org/grok-2": "grok-2",
    "HuggingFaceH4/zephyr-7b-beta": "zephyr",
}
UNKNOWN = [
    "deepseek-ai/DeepSeek-V3-Base",
    "/home/orion/models/my-model",
    "databricks/dbrx-base",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Meta-Llama-3-8B",
    "Qwen/Qwen3-8B-Base",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-Embedding-8B",
    "THUDM/glm-4-9b",
    "zai-org/GLM-4.5-Air-Base",
    "01-ai/Yi-34B",
    "google/gemma-3-4b-pt",
    "google/gemma-2b",
    "ibm-granite/granite-4.0-h-small-base",
    "moonshotai/Kimi-K2-Base",
    "HuggingFaceTB/SmolLM3-3B-Base",
    "moonshotai/Kimi-K2.5",
    "zai-org/GLM-4.8",
    "zai-org/GLM-5",
    "NousResearch/Hermes-4-70B",
    "google/embeddinggemma-300m",
    "google/gemma-3n-E4B-pt",
    "google/paligemma-3b-mix-224",
    "/models/my-finetune",
    "/data/qwen2-instruct/base",
    "/data/qwen2-instruct/step-100",
    "claude-3-5-sonnet",
    "gpt-4o",
    "historion-7b-chat",
    "/x/janusz/model",
    "",
    "/",
    "...",
    "/home/orion/llama-3-chat/run7",
    "/data/gemma-it/pt",
    "my-model-qwenlike",
    "grok-20",
    "deepseek-ai/DeepSeek-V2-Lite",
    "TinyLlama/TinyLlama_v1.1",
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "google/gemma-4-31B",
    "meta-llama/Llama-4-Scout-17B-16E",
    "meta-llama/Llama-Guard-3-8B",
    "mistralai/Pixtral-12B-Base-2409",
    "mistralai/Mistral-Small-24B-Base-2501",
    "OpenGVLab/InternVL3-8B-Pretrained",
    "baichuan-inc/Baichuan2-7B-Base",
    "allenai/OLMo-2-1124-7B",
    "HuggingFaceTB/SmolLM2-135M",
    "deepseek-ai/deepseek-coder-6.7b-instruct",
    "mistralai/Mistral-7B-v0.1",
]
# Jinja text of the data folder -> the registered template; the model type where the text alone is shared.
BY_JINJA: dict[str, tuple[str, str | None]] = {
    "baichuan2": ("baichuan2", "baichuan"),
    "command-a": ("command-a", "cohere2"),
    "deepseek-v3-0324": ("deepseek-v3", "deepseek_v3"),
    "grok-2": ("grok-2", "grok"),
    "internvl3": ("internvl3", "internvl_chat"),
    "llama-3.1": ("llama-3-instruct", "llama"),
    "magistral": ("magistral", "mistral"),
    "smollm3": ("smollm3", "smollm3"),
    "yi-1.5": ("yi-1.5", "llama"),
    "command-r": ("c4ai-command-r", None),
    "deepseek-r1-distill": ("deepseek-r1-distill", "qwen2"),
    "deepseek-v2": ("deepseek-v2", "deepseek_v2"),
    "deepseek-v3": ("deepseek-v3", "DeepseekV3ForCausalLM"),
    "deepseek-v3.1": ("deepseek-v3.1", "deepseek_v3"),
    "gemma-2": ("gemma-it", "Gemma2ForCausalLM"),
    "gemma-3": ("gemma-3-it", "Gemma3ForConditionalGeneration"),
    "gemma-4": ("gemma-4", None),
    "glm-4": ("glm-4", "glm4"),
    "glm-4.5": ("glm-4.5", "glm4_moe"),
    "glm-4.7": ("glm-4.7", "glm4_moe"),
    "gpt-oss": ("gpt-oss", "gpt_oss"),
    "granite-4": ("granite-4", "granitemoehybrid"),
    "hermes-3": ("hermes-3", "llama"),
    "kimi-k2": ("kimi-k2", "kimi_k2"),
    "kimi-k2-thinking": ("kimi-k2-thinking", "kimi_k2"),
    "llama-2": ("llama-2-chat", "llama"),
    "llama-3": ("llama-3-instruct", "LlamaForCausalLM"),
    "llama-3.2": ("llama-3-instruct", "llama"),
    "llama-4": ("llama-4", "llama4"),
    "minimax-m2": ("minimax-m2", "minimax_m2"),
    "mistral-v1": ("mistral-v1", "mistral"),
    "mistral-v3": ("mistral-v3", "mistral"),
    "mistral-v3-tekken": ("mistral-v3-tekken", "mistral"),
    "mistral-v7": ("mistral-v7", "mistral"),
    "mistral-v7-tekken": ("mistral-v7-tekken", "mistral3"),
    "olmo-2": ("olmo-2", "Olmo2ForCausalLM"),
    "phi-3.5": ("phi-3.5", "phi3"),
    "phi-4": ("phi-4", "phi3"),
    "phi-4-mini": ("phi-4-mini", "phi3"),
    "qwen2": ("qwen", "qwen2"),
    "qwen2.5": ("qwen2.5", "qwen2"),
    "qwen3": ("qwen3", "qwen3"),
    "qwq": ("qwq", "qwen2"),
    "smollm2": ("smollm2", "llama"),
    "vicuna": ("vicuna_v1.1", "llama"),
    "yi": ("chatml", "llama"),
    "zephyr": ("zephyr", "mistral"),
}


@pytest.mark.parametrize("model", WELL_KNOWN)
def test_well_known_models_by_path(model: str) -> None:
    assert get_chat_template_by_model_path(model).name == WELL_KNOWN[model]


@pytest.mark.parametrize("model", UNKNOWN)
def test_what_is_not_known_is_an_error_that_names_the_ways_to_choose(model: str) -> None:
    with pytest.raises(UnknownChatTemplate) as caught:
        get_chat_template_by_model_path(model)
    assert isinstance(caught.value, TemplateError)
    assert isinstance(caught.value, KeyError)
    said = str(caught.value)
    assert 'chat_template="chatml"' in said
    assert ".jinja" in said
    assert ".json" in said


@pytest.mark.parametrize("model", WELL_KNOWN)
@pytest.mark.parametrize("folder", ["/models/{}", "/data/qwen2-instruct/{}/", "C:\\orion\\janus\\{}", "./{}"])
def test_only_the_models_own_name_counts(model: str, folder: str) -> None:
    assert match_model_path(folder.format(model_name(model))) == WELL_KNOWN[model]


@pytest.mark.parametrize("model", WELL_KNOWN)
def test_case_does_not_matter(model: str) -> None:
    assert match_model_path(model.upper()) == match_model_path(model.lower()) == WELL_KNOWN[model]


@pytest.mark.parametrize("model", WELL_KNOWN)
def test_base_models_of_a_chat_family_are_not_chat_models(model: str) -> None:
    assert match_model_path(f"{model}-Base") is None
    assert match_model_path(f"{model}-baseline") == WELL_KNOWN[model]


QUANTISED = ["{}-AWQ", "{}-GPTQ", "{}-GPTQ-Int4", "{}-FP8", "{}-FP8-dynamic", "{}-GGUF", "{}.Q4_K_M.gguf",
             "{}-bnb-4bit", "{}-unsloth-bnb-4bit", "{}-MLX-8bit", "someone/{}-w4a16"]  # fmt: skip


@pytest.mark.parametrize("model", WELL_KNOWN)
def test_quantised_copies_and_other_spellings_are_the_same_model(model: str) -> None:
    name = model_name(model)
    spellings = [form.format(name) for form in QUANTISED]
    spellings += [name.replace("-", "_"), f"Org/{name.replace('-', '_')}"]
    hub = f"/root/.cache/huggingface/hub/models--{model.replace('/', '--')}"
    spellings += [hub, f"{hub}/snapshots/0abc", f"{hub}/snapshots/0abc/model.gguf"]
    assert {spelling: match_model_path(spelling) for spelling in spellings} == dict.fromkeys(
        spellings, WELL_KNOWN[model]
    )


def test_a_hub_cache_folder_counts_by_its_model() -> None:
    cached = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/9c925d64"
    assert model_name(cached) == "Qwen3-8B"
    assert model_name("/x/models--Qwen--Qwen3-8B/my-finetune") == "my-finetune"
    assert match_model_path(cached) == "qwen3"
    assert match_model_path("models--gpt2/snapshots/abc") is None


PIECE = st.text(max_size=6) | st.sampled_from(
    ["/", "\\", "models--", "--", "snapshots", "-", "_", ".", "instruct", "chat", "it", "base", "\0",
     "\ud800",
     *(word for model in WELL_KNOWN for word in model.split("/"))]
)  # fmt: skip


@given(path=st.lists(PIECE, max_size=6).map("".join))
def test_any_path_has_a_template_or_the_documented_error(path: str) -> None:
    if match_model_path(path) is None:
        with pytest.raises(UnknownChatTemplate):
            get_chat_template_by_model_path(path)
    else:
        assert get_chat_template_by_model_path(path).name in BUILT_IN


@pytest.fixture
def no_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_FUNCTIONS", [])


@pytest.mark.usefixtures("no_functions")
def test_registered_functions_are_asked_first_in_their_order() -> None:
    asked: list[str] = []

    @register_chat_template_matching_function
    def first(path: str) -> str | None:
        asked.append(path)
        return "zephyr" if "mine" in path else None

    @register_chat_template_matching_function
    def second(path: str) -> str | None:
        return "chatml" if "mine" in path or "yours" in path else None

    assert get_chat_template_by_model_path("/x/mine/Qwen3-8B").name == "zephyr"
    assert get_chat_template_by_model_path("/x/yours/Qwen3-8B").name == "chatml"
    assert get_chat_template_by_model_path("/x/theirs/Qwen3-8B").name == "qwen3"
    assert asked == ["/x/mine/Qwen3-8B", "/x/yours/Qwen3-8B", "/x/theirs/Qwen3-8B"]
    register_chat_template_matching_function(first)
    assert get_chat_template_by_model_path("/x/theirs/Qwen3-8B").name == "qwen3"
    assert len(asked) == 4


@pytest.mark.usefixtures("no_functions")
def test_a_function_that_returns_an_unregistered_name_is_a_key_error() -> None:
    register_chat_template_matching_function(lambda path: "no-such-template")
    with pytest.raises(KeyError, match="no-such-template"):
        get_chat_template_by_model_path("Qwen3-8B")


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.jinja")))
def test_checkpoints_by_their_jinja(name: str) -> None:
    expected, kind = BY_JINJA[name]
    text = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    assert match_checkpoint(text, (), kind) == expected
    # The text speaks; the tokens of a shared vocabulary do not overrule it.
    assert match_checkpoint(text, ["<|im_start|>", "<|im_end|>", "[INST]"], kind) == expected


@pytest.mark.parametrize(
    ("tokens", "kind", "expected"),
    [
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], "llama", "chatml"),
        (["<|im_start|>", "<|im_end|>"], "qwen3", "qwen3"),
        (
            ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            None,
            "llama-3-instruct",
        ),
        (["<|start|>", "<|message|>", "<|channel|>", "<|return|>"], "gpt_oss", "gpt-oss"),
        (["<｜User｜>", "<｜Assistant｜>"], "deepseek_v3", "deepseek-v3"),
        (["<｜User｜>", "<｜Assistant｜>"], "multi_modality", "janus-pro"),
        (["<start_of_turn>", "<end_of_turn>"], "gemma3", "gemma-3-it"),
        (["<start_of_turn>", "<end_of_turn>"], "gemma2", "gemma-it"),
        (["<s>", "</s>"], "llama", None),
        ([], "qwen3", None),
        ([], None, None),
    ],
)
def test_checkpoints_by_their_special_tokens(
    tokens: list[str], kind: str | None, expected: str | None
) -> None:
    assert match_checkpoint(None, tokens, kind) == expected
    assert match_checkpoint("", tokens, kind) == expected


LLAMA_3 = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEKKEN = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]"]


@pytest.mark.parametrize(
    ("tokens", "eos", "names", "expected"),
    [
        (LLAMA_3, ["<|eot_id|>"], [], "llama-3-instruct"),
        (LLAMA_3, ["<|end_of_text|>", "<|eot_id|>"], ["/m/x"], "llama-3-instruct"),
        (LLAMA_3, ["<|end_of_text|>"], ["/m/x-instruct"], "llama-3-instruct"),
        (LLAMA_3, [], ["/m/x", "meta-llama/Llama-3.1-8B-Instruct"], "llama-3-instruct"),
        (LLAMA_3, None, ["meta-llama/Llama-3.1-8B-Instruct"], "llama-3-instruct"),
        (LLAMA_3, ["<|end_of_text|>"], [], None),
        (LLAMA_3, [], None, None),
        (LLAMA_3, None, ["meta-llama/Meta-Llama-3-8B"], None),
        (LLAMA_3, ["<|end_of_text|>"], ["/m/x", "meta-llama/Llama-3.1-8B"], None),
        (LLAMA_3, ["<|eot_id|>"], ["/m/x-base"], None),
        (LLAMA_3, ["<|eot_id|>"], ["/m/reward", "/m/x-instruct"], None),
        (LLAMA_3, [], ["/m/x-chat", "/m/x-base"], "llama-3-instruct"),
        (TEKKEN, ["</s>"], ["/m/x"], None),
        (TEKKEN, ["</s>"], ["Mistral-Small-24B-Instruct-2501"], "mistral-v7-tekken"),
        (["<start_of_turn>", "<end_of_turn>"], ["<eos>"], ["google/gemma-2-9b"], None),
        (["<start_of_turn>", "<end_of_turn>"], ["<eos>", "<end_of_turn>"], [], "gemma-it"),
        (["<｜User｜>", "<｜Assistant｜>"], ["<｜end▁of▁sentence｜>"], ["DeepSeek-V3-Base"], None),
        (["<｜User｜>", "<｜Assistant｜>"], ["<｜end▁of▁sentence｜>"], ["DeepSeek-V3"], "deepseek-v3"),
    ],
)
def test_special_tokens_must_be_borne_out(
    tokens: list[str], eos: list[str] | None, names: list[str] | None, expected: str | None
) -> None:
    assert match_checkpoint(None, tokens) is not None
    assert match_checkpoint(None, tokens, eos_tokens=eos, model_names=names) == expected


@pytest.mark.parametrize("newline", ["\n", "\\n"])
@pytest.mark.parametrize("name", ["hermes-3", "qwen2", "phi-3.5", "qwq"])
def test_a_newline_in_jinjas_strings_may_be_spelled(name: str, newline: str) -> None:
    expected, kind = BY_JINJA[name]
    text = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    assert match_checkpoint(text.replace("\\n", newline), (), kind) == expected


def test_granite_3_checkpoints_are_not_granite_4() -> None:
    text = (DATA / "granite-4.jinja").read_text(encoding="utf-8")
    third = text.replace("You are a helpful assistant. Please ensure responses are", "Today's Date: x.")
    assert match_checkpoint(text, (), "granite") == "granite-4"
    assert match_checkpoint(third, (), "granite") is None
    roles = ["<|start_of_role|>", "<|end_of_role|>"]
    assert match_checkpoint(None, roles, "granite") is None
    assert match_checkpoint(None, roles, "granitemoehybrid") == "granite-4"


def test_a_jinja_text_needs_no_bearing_out() -> None:
    text = (DATA / "llama-3.jinja").read_text(encoding="utf-8")
    found = match_checkpoint(text, LLAMA_3, eos_tokens=[], model_names=["my-base"])
    assert found == "llama-3-instruct"


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
        "{% for m in messages %}<turn who={{ m.role }}>{{ m.content }}</turn>{% endfor %}",
        "{{ bos_token }}{% for m in messages %}### {{ m.role }}{{ m.content }}{{ eos_token }}{% endfor %}",
    ],
)
def test_a_jinja_text_of_no_known_family_names_none(text: str) -> None:
    assert match_checkpoint(text, ["<|im_start|>", "<|im_end|>"], "qwen2") is None


@given(
    text=st.none() | st.text(max_size=60), tokens=st.lists(st.text(max_size=6)), kind=st.none() | st.text()
)
def test_any_checkpoint_has_a_registered_name_or_none(
    text: str | None, tokens: list[str], kind: str | None
) -> None:
    assert match_checkpoint(text, tokens, kind) in {None, *BUILT_IN}


@pytest.mark.parametrize("model", WELL_KNOWN)
def test_no_two_rules_claim_a_model_equally(model: str) -> None:
    name = model_name(model).lower()
    claims = [(rule, rule.search(name)) for family in FAMILIES for rule in family.names]
    found = [(match.start(), -match.end(), rule.template) for rule, match in claims if match is not None]
    best = min(found)[:2]
    assert {template for start, end, template in found if (start, end) == best} == {WELL_KNOWN[model]}


def test_rules_and_marks_name_registered_templates() -> None:
    for family in FAMILIES:
        assert {rule.template for rule in family.names} <= set(BUILT_IN)
        assert {marks.template for marks in family.marks} <= set(BUILT_IN)
