from sglang_dsl.test import doc_patch as doc_patch
from sglang_dsl.test import test_utils as test_utils
