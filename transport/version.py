"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("wavecore")
except PackageNotFoundError:  # run from a checkout with PYTHONPATH=src
    VERSION = "0+source"
