"""Metrics of a run: their names and aggregation, TensorBoard and JSONL files, the terminal view."""
