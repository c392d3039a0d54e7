"""Programmatic dependent launch: a kernel of a step starts while the one before it ends (CUDA programming guide).

What a kernel can do without its predecessors' results, such as to load weights, it does before `follow`; from there on
all that they wrote is visible, and the next kernel may start. A kernel that is launched so (`device.early`) must call
it on every path before it touches what another one reads or writes: the wait of each is what the next one's rests on.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
