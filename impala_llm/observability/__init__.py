"""Metrics of a run: their names and aggregation, TensorBoard and JSONL files, the terminal view.

- metrics: every metric with its meaning; meters: those of a step beside the update's; stages: its times; intervals
- writers, tensorboard: files; terminal, actor_news: what is shown
"""
