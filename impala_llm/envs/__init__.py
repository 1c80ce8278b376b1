"""Text environments by name."""

from impala_llm.envs import contract
from impala_llm.envs.base import Suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.envs.extras import MissingPackage
from impala_llm.plugs import ENVIRONMENTS, load, raised_at
from impala_llm.processes.stop_signals import ToldToStop
from impala_llm.settings import PACKAGE, EnvConfig


def make_suite(config: EnvConfig) -> Suite:
    """Make the suite that `env.name` means, with its catalogue where it has one.

    Raises:
        EnvironmentFault: it cannot be made, such as for a data file that cannot be read, or is no suite.
    """
    try:
        make = load(ENVIRONMENTS, config.name)
        options = config.webshop if config.name == "webshop" else config.args
        if isinstance(options, dict):
            suite: Suite = make(**options)
        else:
            suite = make() if options is None else make(options)
    except MissingPackage as error:
        raise EnvironmentFault(f"env.name={config.name} cannot be made: {error}") from error
    except (KeyboardInterrupt, ToldToStop):
        raise
    except BaseException as error:  # an environment is other people's code, and may call sys.exit()
        reason = " ".join(str(error).split())
        where = raised_at(error)
        if config.name in ENVIRONMENTS.packaged or str(PACKAGE) in where:  # not the user's code, or its import failed
            where = ""
        raise EnvironmentFault(
            f"env.name={config.name} cannot be made: {type(error).__name__}: {reason}{where}: correct what is "
            "set below env, or the files that are named there"
        ) from error
    contract.check_suite(suite, config.name)
    return suite
