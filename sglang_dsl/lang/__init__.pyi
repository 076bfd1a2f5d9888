from sglang_dsl.lang import api as api
from sglang_dsl.lang import backend as backend
from sglang_dsl.lang import chat_template as chat_template
from sglang_dsl.lang import choices as choices
from sglang_dsl.lang import global_config as global_config
from sglang_dsl.lang import interpreter as interpreter
from sglang_dsl.lang import ir as ir
from sglang_dsl.lang import tracer as tracer
