from sglang_dsl.utils import (
    add_common_other_args_and_parse,
    add_common_sglang_args_and_parse,
    dump_bench_raw_result,
    is_in_ci,
    select_sglang_backend,
)

__all__ = [
    "add_common_other_args_and_parse", "add_common_sglang_args_and_parse", "dump_bench_raw_result",
    "is_in_ci", "select_sglang_backend",
]  # fmt: skip
