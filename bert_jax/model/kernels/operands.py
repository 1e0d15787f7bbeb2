"""Types of the operands that the bodies of Pallas kernels read, write and index."""

from functools import partial

import jax
from jax.experimental import pallas as pl

Arrays = tuple[jax.Array, ...]
# An operand of a kernel, in the memory of a program.
Ref = jax.Ref
# The first token or row of a block, traced in a loop.
Index = jax.Array | int
Span = pl.Slice | slice
# A body with its static options.
Kernel = partial[None]
# What ``pallas_call`` reads, or the shape of what it writes.
Operand = jax.Array | jax.ShapeDtypeStruct
