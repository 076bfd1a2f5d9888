"""Options of servers and engines under sglang's names. One that asks for the default is accepted, one of
another engine's implementation is accepted with a warning, an unsupported one is refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from runtime.protocol.errors import NotSupported

SAME: Final[Mapping[str, str]] = {
    "mem_fraction_static": "memory_fraction",
    "schedule_conservativeness": "conservativeness",
    "stream_output": "incremental_streaming",
    "incremental_streaming_output": "incremental_streaming",
    "random_seed": "seed",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "enable_mixed_chunk": "mixed_prefill",
    "max_queued_requests": "max_waiting_requests",
    "radix_eviction_policy": "eviction_policy",
    "priority_scheduling_preemption_threshold": "preemption_threshold",
    "tokenizer_worker_num": "http_workers",
    "watchdog_timeout": "step_timeout_s",
}
# A switch -> an option and its value.
SWITCHES: Final[Mapping[str, tuple[str, str]]] = {
    "enable_priority_scheduling": ("schedule_policy", "priority"),
    "constrained_json_disable_any_whitespace": ("grammar_whitespace", "compact"),
}
# Values with other names here.
VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "dtype": {"float": "float32"},
    "load_format": {"safetensors": "auto"},
    "log_level": {"critical": "error", "fatal": "error", "warn": "warning", "trace": "debug"},
}
# Values that leave the option at its default, with a warning.
_LEFT: Final[Mapping[str, tuple[Any, ...]]] = {
    "dtype": ("half", "float16"),
    "chunked_prefill_size": (-1,),
    "schedule_policy": ("routing-key",),
}
OPPOSITE: Final[Mapping[str, str]] = {
    "disable_radix_cache": "radix_cache",
    "disable_jump_forward": "jump_forward",
    "disable_regex_jump_forward": "jump_forward",
    "disable_overlap_schedule": "overlap",
    "disable_cuda_graph": "cuda_graph",
}
ATTENTION_BACKENDS: Final = ("triton",)
"""sglang's attention backends that exist here; others change no answer."""
# name -> values that are the default anyway. A checkpoint's own code is never run, whatever the option says.
ANYWAY: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        ("dp_size", "dp", "data_parallel_size", "pp_size", "pp", "pipeline_parallel_size", "ep_size", "ep",
         "expert_parallel_size", "nnodes", "gpu_id_step", "stream_interval"),
        (1,),
    ),
    **dict.fromkeys(("node_rank", "base_gpu_id"), (0,)),
    **dict.fromkeys(
        ("trust_remote_code", "disable_cuda_graph_padding", "disable_piecewise_cuda_graph",
         "disable_custom_all_reduce", "disable_outlines_disk_cache", "enable_p2p_check",
         "enable_custom_logit_processor", "enable_deterministic_inference", "is_embedding",
         "skip_server_warmup"),
        (True, False),
    ),
    **dict.fromkeys(("enable_torch_compile", "skip_tokenizer_init"), (False,)),
    **dict.fromkeys(("tokenizer_mode", "model_impl"), ("auto",)),
    **dict.fromkeys(
        ("disaggregation_ib_device", "warmups", "revision", "constrained_json_whitespace_pattern",
         "modelopt_quant", "quantization_param_path"),
        (None,),
    ),
    "default_chat_template_kwargs": (None, {}),
    "json_model_override_args": (None, "", "{}"),
    **dict.fromkeys(("preferred_sampling_params", "torchao_config"), (None, "")),
}  # fmt: skip
# Options of another engine's implementation, which change no answer.
IDLE: Final[frozenset[str]] = frozenset({
    "attention_backend", "bucket_e2e_request_latency", "bucket_inter_token_latency",
    "bucket_time_to_first_token", "collect_tokens_histogram",
    "cpu_offload_gb", "crash_dump_folder", "decode_attention_backend", "decode_log_interval",
    "default_reasoning_parser", "delete_ckpt_after_loading",
    "disable_chunked_prefix_cache", "disable_fast_image_processor", "disable_flashinfer",
    "disable_flashinfer_sampling", "disable_hicache_numa_detect", "disable_mla", "disable_nan_detection",
    "disable_shared_experts_fusion", "dist_init_addr", "dist_timeout", "download_dir", "dp_attention",
    "enable_cudagraph_gc", "enable_double_sparsity", "enable_dp_attention", "enable_dp_lm_head",
    "enable_ep_moe", "enable_expert_distribution_metrics", "enable_flashinfer_allreduce_fusion",
    "enable_fused_moe_sum_all_reduce", "enable_hierarchical_cache", "enable_lmcache",
    "enable_memory_saver", "enable_metrics_for_all_schedulers", "enable_mla", "enable_mscclpp",
    "enable_multimodal", "enable_nan_detection", "enable_nccl_nvls", "enable_overlap_schedule",
    "enable_pdmux", "enable_piecewise_cuda_graph", "enable_profile_cuda_graph",
    "enable_request_time_stats_logging", "enable_return_hidden_states", "enable_return_routed_experts",
    "enable_single_batch_overlap", "enable_symm_mem", "enable_tokenizer_batch_encode",
    "enable_torch_symm_mem", "enable_trace", "enable_two_batch_overlap", "enable_weights_cpu_backup",
    "export_metrics_to_file", "file_storage_path", "flashinfer_mla_disable_ragged", "forward_hooks",
    "fp8_gemm_backend", "gc_warning_threshold_secs", "generation_tokens_buckets", "hooks",
    "keep_mm_feature_on_device", "kv_events_config", "load_balance_method",
    "log_level_http", "log_requests", "log_requests_format", "log_requests_level", "log_requests_target",
    "lora_backend", "lora_eviction_policy", "lora_target_modules", "mamba_ssm_dtype",
    "max_mamba_cache_size",
    "max_micro_batch_size", "max_torch_compile_bs", "mm_attention_backend",
    "moe_a2a_backend", "moe_dense_tp_size", "moe_runner_backend", "multi_item_scoring_delimiter",
    "nccl_port", "num_continuous_decode_steps", "otlp_traces_endpoint",
    "page_first", "prefill_attention_backend", "prefill_max_requests",
    "prompt_tokens_buckets", "reasoning_tokens_buckets",
    "remote_instance_weight_loader_seed_instance_ip", "sampling_backend", "sampling_defaults",
    "scheduler_recv_interval", "show_time_cost", "sleep_on_idle", "swa_full_tokens_ratio",
    "tbo_token_distribution_threshold",
    "tp_comm_overlap", "triton_attention_num_kv_splits", "triton_attention_reduce_in_fp32",
    "triton_attention_split_tile_size", "weight_loader_disable_mmap", "weight_version",
})  # fmt: skip
_FAMILIES: Final = (
    "cuda_graph_", "deepep_", "ds_", "elastic_", "enable_eplb", "ep_", "eplb_", "hicache_",
    "kt_", "mm_", "moe_", "nsa_", "speculative_", "torch_compile_",
)  # fmt: skip
_SUPPORTED: Final = frozenset({"cuda_graph_max_bs"})
SPECULATION: Final = ("NGRAM", "STANDALONE")
"""The supported algorithms of speculation; others change no answer."""
_OTHER_ALGORITHMS: Final = ("EAGLE", "EAGLE3", "NEXTN", "DFLASH")
_SPECULATIVE: Final[frozenset[str]] = frozenset({
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens",
    "speculative_num_steps", "speculative_ngram_min_match_window_size",
    "speculative_ngram_max_match_window_size",
})  # fmt: skip
_WHY: Final[Mapping[str, str]] = {
    "tokenizer_path": "a checkpoint's tokenizer is read from its own folder: put its files there",
    "enable_torch_compile": "leave it out",
    "skip_tokenizer_init": "requests may give input_ids all the same",
}
_ONE: Final = "one model on one device: leave it out"
_CHANGES: Final = "the answers would be others than with it: leave it out"


def runtime_options(
    options: Mapping[str, Any],
    model: Any = None,
    *,
    lenient: bool = False,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """`options` with the runtime's names; names that are in no table stay. `model`: the checkpoint, which may
    be named as its own tokenizer. One warning, by `tell`, names all options without effect. Raises
    NotSupported for an unsupported one; `lenient`: only for another tokenizer."""
    renamed: dict[str, Any] = {}
    idle: list[str] = []
    algorithm = options.get("speculative_algorithm")
    guesses = bool(algorithm) and str(algorithm).upper() not in _OTHER_ALGORITHMS
    for name, value in options.items():
        if guesses and name in _SPECULATIVE:
            renamed[name] = value
        elif name in ANYWAY or name == "tokenizer_path":
            if value in ANYWAY.get(name, (None, model)):
                continue
            if not lenient or name == "tokenizer_path":
                raise NotSupported(
                    f"the bundled runtime has no {name}={value!r}",
                    where=name,
                    hint=_WHY.get(name, _CHANGES if None in ANYWAY.get(name, ()) else _ONE),
                )
            idle.append(f"{name}={value}")
        elif name == "attention_backend" and value in ATTENTION_BACKENDS:
            renamed["attention"] = value
        elif is_idle(name) or value in _LEFT.get(name, ()):
            if value is not None and value is not False:
                idle.append(f"{name}={value}")
        elif name == "lora_paths":
            renamed[name] = _adapters(value)
        elif name in SWITCHES:
            if value:
                option, chosen = SWITCHES[name]
                renamed[option] = chosen
        elif name in OPPOSITE:
            renamed[OPPOSITE[name]] = not value
        else:
            option = SAME.get(name, name)
            renamed[option] = VALUES.get(option, {}).get(value, value) if isinstance(value, str) else value
    if idle:
        text = f"without effect on the bundled runtime: {', '.join(idle)}"
        if tell is None:
            warnings.warn(text, stacklevel=3)
        else:
            tell(text)
    return renamed


def _adapters(adapters: Any) -> Any:
    """lora_paths as NAME=DIRECTORY each, from a dict or objects. Raises NotSupported."""
    match adapters:
        case None:
            return ()
        case str():
            return (adapters,)
        case dict():
            return tuple(f"{name}={path}" for name, path in adapters.items())
        case list() | tuple():
            return tuple(_adapter(one) if isinstance(one, Mapping) else one for one in adapters)
        case _:
            return adapters  # the config refuses it


def _adapter(adapter: Mapping[str, Any]) -> str:
    if adapter.get("pinned"):
        raise NotSupported(
            "an adapter is pinned when it is loaded later",
            where="lora_paths",
            hint="load_lora_adapter(name, path, pinned=True)",
        )
    return f"{adapter.get('lora_name', '')}={adapter.get('lora_path', '')}"


def known(name: str) -> bool:
    tables = (SAME, OPPOSITE, SWITCHES, VALUES, _LEFT, ANYWAY, ("tokenizer_path",))
    return any(name in table for table in tables) or is_idle(name)


def is_idle(name: str) -> bool:
    """Whether the option `name` is without effect whatever its value."""
    return name in IDLE or (name.startswith(_FAMILIES) and name not in _SUPPORTED)
