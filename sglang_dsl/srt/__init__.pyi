from sglang_dsl.srt import constrained as constrained
from sglang_dsl.srt import hf_transformers_utils as hf_transformers_utils
from sglang_dsl.srt import utils as utils
