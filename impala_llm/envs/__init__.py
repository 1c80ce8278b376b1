"""Text environments by name."""

from collections.abc import Callable

from impala_llm.envs.base import Suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.settings import EnvConfig


def make_suite(config: EnvConfig) -> Suite:
    """The suite that `env.name` means; loads or makes its catalogue.

    Raises:
        EnvironmentFault: it cannot be made, such as for a data file that cannot be read.
    """
    try:
        return _maker(config)()
    except Exception as error:  # an environment is other people's code
        reason = " ".join(str(error).split())
        raise EnvironmentFault(
            f"env.name={config.name} cannot be made: {type(error).__name__}: {reason}: correct what is "
            "set below env, or the files that are named there"
        ) from error


def _maker(config: EnvConfig) -> Callable[[], Suite]:
    if config.name == "webshop":
        from impala_llm.envs.webshop.suite import suite_from_config  # loads the catalogue's code only where it is used

        return lambda: suite_from_config(config.webshop)
    from impala_llm.envs.toy import CorridorSuite, ParrotSuite

    toys = {"parrot": ParrotSuite, "corridor": CorridorSuite}
    if config.name not in toys:
        raise ValueError(f"env.name={config.name} is not known: choose one of webshop, {', '.join(toys)}")
    return toys[config.name]
