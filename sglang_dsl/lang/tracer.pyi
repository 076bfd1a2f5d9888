from sglang_dsl.compiler.trace import Program, Tracer

__all__ = ["Program", "Tracer"]
