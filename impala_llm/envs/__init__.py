"""Text environments by name."""

from impala_llm.envs.base import Suite
from impala_llm.settings import EnvConfig


def make_suite(config: EnvConfig) -> Suite:
    """The suite that `env.name` means; loads or makes its catalogue.

    Raises:
        ValueError: a data file that cannot be read, or an unknown name.
    """
    if config.name == "webshop":
        from impala_llm.envs.webshop.suite import suite_from_config  # loads the catalogue's code only where it is used

        return suite_from_config(config.webshop)
    from impala_llm.envs.toy import CorridorSuite, ParrotSuite

    toys = {"parrot": ParrotSuite, "corridor": CorridorSuite}
    if config.name not in toys:
        raise ValueError(f"env.name={config.name} is not known: choose one of webshop, {', '.join(toys)}")
    return toys[config.name]()
