"""The commands of the console script `impala-llm`, and what only they need.

- parser: the commands, their options and help; preflight: checks of the host before a run
- doctor: a report on the host; model_memory: what a run's model takes of it; rank_group: whether two ranks find each
  other on it
- new_environment: files to begin with; settings_reference, metrics_reference: docs/settings.md, docs/metrics.md
"""
