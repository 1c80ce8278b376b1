"""Evaluations inside of a run: in_run and schedule at the learner, episodes at an actor. The command: evaluate.py,
whose figures are in results."""
