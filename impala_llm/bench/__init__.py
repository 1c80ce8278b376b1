"""Benchmarks, one module each, run by `impala-llm bench NAME`; frame.py says what such a module looks like."""
