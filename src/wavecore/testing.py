"""For tests of your own programs, with pytest: GPUs or a skip, and deployments that leave nothing behind.

from wavecore.testing import deployment, gpus
"""

from wavecore.frontend.fixtures import deployment, gpus

__all__ = ["deployment", "gpus"]
