"""The rotation of head dimensions: Sylvester's Hadamard matrix over sqrt(H), symmetric and its own inverse."""

import jax
import jax.numpy as jnp
import scipy.linalg


def exists(head_dim: int) -> bool:
    """Whether Sylvester's construction has a matrix of this size."""
    return head_dim >= 1 and not head_dim & (head_dim - 1)


def rotate(x: jax.Array) -> jax.Array:
    """x [..., H] times the Hadamard matrix / sqrt(H), in true fp32, returned in x's dtype.

    The matrix is H_2n = [[H_n, H_n], [H_n, -H_n]] (Sylvester 1867), without random signs. It is one matrix product: the
    steps of the fast transform, log2 H of them, XLA fuses with what is computed from them into expressions of H terms
    for each element, and a program with it compiled for four minutes. Like every product, it may round differently at
    another number of rows.
    """
    signs = jnp.asarray(scipy.linalg.hadamard(x.shape[-1]), jnp.float32)
    product = jnp.matmul(x.astype(jnp.float32), signs, precision=jax.lax.Precision.HIGHEST)
    return (product * x.shape[-1] ** -0.5).astype(x.dtype)
