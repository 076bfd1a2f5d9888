from sglang_dsl.srt.utils import hf_transformers_utils as hf_transformers_utils
from sglang_dsl.utils import load_image

__all__ = ["load_image"]
