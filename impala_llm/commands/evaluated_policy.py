"""Sentences for `impala-llm evaluate` about a policy that was made for other tasks, or has learned from those that it
is to play."""

import contextlib
from pathlib import Path
from typing import Any

import yaml

from impala_llm.commands.model_files import starting_policy_problems
from impala_llm.config import to_yaml
from impala_llm.envs.webshop.learned_catalogues import FILE as LEARNED_CATALOGUES
from impala_llm.envs.webshop.learned_catalogues import kind_of, seeds_of
from impala_llm.settings import Config, model_directory, written

_MAY_HAVE_LEARNED = "it may have been trained on tasks that are held out now"


def unfit_policy(config: Config) -> str | None:
    """A sentence where the policy to be evaluated is known to have been made for other tasks; None otherwise."""
    env, path = config.env.name, config.model.path
    if path == "scratch" or config.agent.is_set:
        return None
    if found := starting_policy_problems(config):
        return found[0]
    directory = model_directory(path)
    if directory is not None and config.plays_shop and (found_seed := _learned_catalogue(config, directory)):
        return found_seed
    with contextlib.suppress(OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        run = directory if directory is None else directory.parent
        if run is not None and run.parent.name == "checkpoints":
            run = run.parent.parent
        trained = None if run is None else yaml.safe_load((run / "config.yaml").read_text())
        agent = {} if trained is None else trained.get("agent") or {}
        if trained is None or agent.get("name") or agent.get("command"):  # an agent's tasks are its own
            return None
        if (before := trained["env"]["name"]) != env:
            return f"model.path={path} was trained with env={before}: its scores with env={env} may say nothing"
        args = yaml.safe_load(to_yaml(config))["env"]["args"] or {}
        others = {key: value for key, value in (trained["env"]["args"] or {}).items() if args.get(key) != value}
        if others:
            were = ", ".join(
                f"env.args.{key}={written(value)}, and not {written(args.get(key))}" for key, value in others.items()
            )
            return f"model.path={path} was trained with {were}: {_MAY_HAVE_LEARNED}"
        return _unfit_shopper(config, trained) if env == "webshop" else None
    return None


def _learned_catalogue(config: Config, directory: Path) -> str | None:
    """`unfit_policy` by what stands beside the policy."""
    shop, unseen = config.env.webshop, config.evaluation.unseen_seed
    if unseen is None or (unseen == shop.catalogue_seed and shop.items is None):
        return None
    with contextlib.suppress(OSError):
        learned = seeds_of((directory / LEARNED_CATALOGUES).read_bytes(), kind_of(vars(shop)))
        return _not_unseen(config) if unseen in learned else None
    return None


def left_out_catalogue(config: Config) -> str | None:
    """A sentence where an evaluation leaves out the unseen catalogue, which is that of its tasks; None otherwise."""
    shop, unseen = config.env.webshop, config.evaluation.unseen_seed
    if not config.plays_shop or shop.items is not None or unseen != shop.catalogue_seed:
        return None
    return (
        f"evaluation.unseen_seed={unseen} is left out, since the tasks are of this catalogue (env.webshop."
        f"catalogue_seed={unseen}): set another seed to play an unseen one, or evaluation.unseen_seed=null"
    )


def _not_unseen(config: Config) -> str:
    unseen = config.evaluation.unseen_seed
    return (
        f"model.path={config.model.path} has learned from catalogue {unseen}, which evaluation.unseen_seed={unseen} "
        "plays as an unseen one: set another seed, or evaluation.unseen_seed=null"
    )


def _unfit_shopper(config: Config, trained: dict[str, Any]) -> str | None:
    """`unfit_policy` of a policy that was trained in the shop. Made catalogues of the same size and another seed have
    other products; those of another size share asins at most, of other products. The splits of a hard one share none;
    the goals of files, or of an easy one, are dealt anew.

    Args:
        trained: the settings of its training.
    """
    path, shop, unseen = config.model.path, config.env.webshop, config.evaluation.unseen_seed
    before, number = trained["env"]["webshop"], trained["demonstrations"]["num_catalogues"]
    is_alike = all(before[key] == getattr(shop, key) for key in ("catalogue", "num_products"))
    first = before["catalogue_seed"]
    learned = range(first, first + number) if before["items"] is None and is_alike else ()
    if unseen in learned and (unseen != shop.catalogue_seed or shop.items is not None):
        return _not_unseen(config)
    keys: tuple[str, ...] = ()
    if shop.items is not None and before["items"] is not None:
        keys = ("items", "num_products", "goals")
    elif shop.items is None and shop.catalogue == "easy" and shop.catalogue_seed in learned:
        keys = ("goals",)
    others = [key for key in keys if before[key] != getattr(shop, key)]
    were = ", ".join(
        f"env.webshop.{key}={written(before[key])}, and not {written(getattr(shop, key))}" for key in others
    )
    return f"model.path={path} was trained with {were}: {_MAY_HAVE_LEARNED}" if others else None
