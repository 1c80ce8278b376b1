"""Metrics of a run: their names and aggregation, TensorBoard and JSONL files, the terminal view.

- metrics: every metric with its meaning; meters: those of a step beside the update's; stages: its times; intervals;
  actor_metrics: those of an actor
- writers, tensorboard: files; terminal, actor_news: what is shown
"""
