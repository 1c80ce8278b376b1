"""Warnings about settings that are allowed and likely to fail, by the settings alone."""

from impala_llm.settings import Config


def settings_cautions(config: Config) -> list[str]:
    """Return a sentence with key, value and fix for each."""
    if config.learner.epochs == 1 or config.algorithm.loss.bounds_steps:
        return []
    return [
        f"learner.epochs={config.learner.epochs} with algorithm.loss={config.algorithm.loss.name}: this loss does "
        "not bound how far several passes over a batch move the policy; take algorithm=ppo or "
        "algorithm.loss=ppo_clip, or set learner.epochs=1"
    ]
