"""A run's configuration: TOML in, one frozen, checked `Config` out; errors that name the key, the value and the fix."""

from jaxpar.config.errors import ConfigError
from jaxpar.config.help import help_text
from jaxpar.config.loading import load_config, parse_config
from jaxpar.config.resolved import changed_keys, dump_toml
from jaxpar.config.schema import Config

__all__ = ["Config", "ConfigError", "changed_keys", "dump_toml", "help_text", "load_config", "parse_config"]
