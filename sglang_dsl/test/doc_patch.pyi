from sglang_dsl.utils import launch_server_cmd

__all__ = ["launch_server_cmd"]
