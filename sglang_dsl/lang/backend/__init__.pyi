from sglang_dsl.lang.backend import anthropic as anthropic
from sglang_dsl.lang.backend import base_backend as base_backend
from sglang_dsl.lang.backend import crusoe as crusoe
from sglang_dsl.lang.backend import litellm as litellm
from sglang_dsl.lang.backend import openai as openai
from sglang_dsl.lang.backend import runtime_endpoint as runtime_endpoint
from sglang_dsl.lang.backend import vertexai as vertexai
