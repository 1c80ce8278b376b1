"""Names that other trainers use, and the settings and choices that they mean here."""

import difflib
from collections.abc import Sequence

from impala_llm.plugs import ENGINES, ENVIRONMENTS, installed_parts, part_suggestion, suggestion

FAMILIAR_NAMES = {
    "advantage": "algorithm.credit",
    "advantage_estimator": "algorithm.credit",
    "adv_estimator": "algorithm.credit",
    "bf16": "learner.precision",
    "batch": "learner.batch_size",
    "is_cap": "algorithm.loss.cap",
    "mini_batches": "learner.minibatches",
    "n": "algorithm.group_size",
    "n_samples": "algorithm.group_size",
    "num_epochs": "learner.epochs",
    "num_generations": "algorithm.group_size",
    "ppo_epochs": "learner.epochs",
    "clip_ratio": "algorithm.loss.clip_high",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "loss_type": "algorithm.loss",
    "kl_loss_coef": "algorithm.kl_coef",
    "use_kl_loss": "algorithm.kl_coef",
    "num_train_epochs": "learner.total_updates",
    "total_epochs": "learner.total_updates",
    "train_batch_size": "learner.batch_size",
    "eval_steps": "evaluation.every_updates",
    "test_freq": "evaluation.every_updates",
    "eta": "algorithm.max_staleness",
    "gamma": "algorithm.credit.discount",
    "gradient_accumulation": "learner.token_budget",
    "gradient_accumulation_steps": "learner.token_budget",
    "gradient_checkpointing": "learner.activation_checkpointing",
    "torch_compile": "learner.compile_layers",
    "lambda": "algorithm.credit.lam",
    "logger": "run.metric_writers",
    "lr": "learner.learning_rate",
    "max_completion_length": "engine.max_new_tokens",
    "max_model_len": "engine.max_length",
    "max_prompt_length": "engine.max_length",
    "max_response_length": "engine.max_new_tokens",
    "max_steps": "learner.total_updates",
    "max_tokens": "engine.max_new_tokens",
    "max_updates": "learner.total_updates",
    "micro_batch_size": "learner.token_budget",
    "model": "model.path",
    "model_name_or_path": "model.path",
    "num_steps": "learner.total_updates",
    "num_updates": "learner.total_updates",
    "num_workers": "actor.num_actors",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "learner.token_budget",
    "ppo_mini_batch_size": "learner.minibatches",
    "report_to": "run.metric_writers",
    "rollouts": "actor.max_episodes",
    "save_steps": "learner.save_every",
    "steps": "learner.total_updates",
    "total_steps": "learner.total_updates",
    "total_training_steps": "learner.total_updates",
    "tp": "engine.tensor_parallel",
    "tp_size": "engine.tensor_parallel",
    "wandb": "run.metric_writers",
}
"""Names that other trainers have for some of our settings, by the last part of the key."""


_SYMMETRIC = "algorithm.loss.clip_high=0.2 algorithm.loss.dual_clip=null"
"""Clip at 1 ± 0.2 alone: by default it is DAPO's, 0.8 and 1.28, and dual."""

FAMILIAR_CHOICES = {
    "algorithm=grpo": f"group_relative_by_std algorithm.loss=ppo_clip {_SYMMETRIC} "
    "algorithm.aggregate=sequence_mean_token_mean algorithm.kl_coef=0.04",
    "algorithm=dapo": "group_relative_by_std algorithm.loss=ppo_clip algorithm.loss.dual_clip=null algorithm.refill=2",
    "algorithm=dr_grpo": f"group_relative algorithm.loss=ppo_clip {_SYMMETRIC} "
    "algorithm.aggregate=sequence_mean_token_sum",
    "algorithm=rloo": "group_relative algorithm.credit=rloo algorithm.loss=reinforce "
    "algorithm.aggregate=sequence_mean_token_sum",
    "algorithm=cispo": "group_relative_by_std algorithm.loss=cispo",
    "algorithm=gspo": "group_relative_by_std algorithm.loss=gspo algorithm.loss.dual_clip=null "
    "algorithm.aggregate=sequence_mean_token_mean",
    "algorithm=tis": "group_relative",
    "algorithm=impala": "vtrace algorithm.loss=truncated_is",
    "algorithm=areal": f"decoupled_ppo algorithm.loss.proximal=recomputed {_SYMMETRIC} learner.minibatches=4",
    "engine=vllm": "sglang",
    "engine=embedded": "torch",
    "engine=hf": "torch",
}
"""Names that others have for what our presets name: the word, and the choice, with the further words that make it that
method, as its paper has it. Coefficients are those of their authors' runs: kl_coef of GRPO from DeepSeekMath (Shao et
al., 2024, section 4.2), minibatches from the published settings of AReaL (ppo_n_minibatches), and the clip's 0.2, which
GRPO's papers leave open, from PPO (Schulman et al., 2017). DAPO's overlong_tokens depends on engine.max_length, and is
left to the user; its groups without variance are replaced until a batch is full, here at most twice as many."""


def meant_by(key: str, known: Sequence[str]) -> str | None:
    """The setting that an unknown key may stand for."""
    last = key.rsplit(".", 1)[-1]
    section = key.partition(".")[0]
    same = [name for name in known if name.rsplit(".", 1)[-1] == last]
    familiar = []
    if meant := FAMILIAR_NAMES.get(last.lower()):
        of_section = f"{section}.{meant.rpartition('.')[2]}"  # as sft.learning_rate of sft.lr
        familiar = [of_section if of_section in known else meant]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    # One of the section that was named comes first: learner.max_steps is no step of the shop's.
    found = sorted([*same, *familiar], key=lambda name: name.partition(".")[0] != section)
    return next(iter([*found, *close]), None)


def unknown_choice(group: str, value: str, presets: Sequence[str]) -> str:
    """Return what is said of a word that is no preset of a group, such as `algorithm`, and no part of the user's."""
    kind = {"env": ENVIRONMENTS, "engine": ENGINES}.get(group)
    choices = [*presets, *sorted(installed_parts(kind))] if kind else presets
    meant = FAMILIAR_CHOICES.get(f"{group}={value}".lower())
    if group == "model" and "/" in value:
        meant = "pretrained model.path=FOLDER, of a model on this disk"
    nearest = (part_suggestion if kind else suggestion)(value, choices, f"{group}=")
    own = ", or your own as module:Class or module:function" if kind else ""
    hint = f"here it is {group}={meant}" if meant else f"{nearest}choose one of {', '.join(choices)}{own}"
    return f"{group}={value} is not known: {hint}"
