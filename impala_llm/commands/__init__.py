"""The commands of the console script `impala-llm`, and what only they need.

- parser: the commands, their options and help
- preflight: checks of the host before a run; model_files, host_space: those of models, memory and disk
- evaluated_policy: whether a policy was made for the tasks that it is to play
- doctor: a report on the host; model_memory: what a run's model takes of it; rank_group: whether two ranks find each
  other on it
- new_environment: files to begin with; settings_reference, metrics_reference: docs/settings.md, docs/metrics.md
"""
