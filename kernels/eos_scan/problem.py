"""A recurrence as backends take it: directions, canonical shapes, a complex oscillation in real numbers, gradients."""
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common.checks import exporting
from ..common.numerics import STEP_LOG_MIN, bounded, compute_dtype, empty_result
from .constant import is_constant, run_constant
from .generator import DecayGenerator

Output = Tuple[Tensor, Optional[Tensor]]
# Passes over the line, by direction: whether each goes from the last token to the first.
DIRECTIONS = {'forward': (False,), 'reverse': (True,), 'both': (False, True)}


class Oscillation(NamedTuple):
    """o = exp(log_o_k + log_o_d + log_o) e^{i theta}, as the arguments of `eos_elementwise` say."""

    log_o_k: Optional[Tensor] = None
    log_o_d: Optional[Tensor] = None
    log_o: Optional[Tensor] = None
    theta: Optional[Tensor] = None
    generator: Optional[DecayGenerator] = None


class RealProblem(NamedTuple):
    """An elementwise recurrence in real numbers, in canonical shapes.

    i: (B, H, T, D). e, s: (B, H, T, K), or (H, K, D) if the oscillation has full rank.
    log_k, log_d: clamped step logs (B, H, T, K) and (B, H, T, D), or None; B, T and channels may be 1.
    z, weight: (B, H, T, K), (B, H, T, D) or (B, H, T, K, D), and (H, K, D), whose product makes an oscillation of full
        rank (see `DecayGenerator`), or None; in z every size may be 1, in weight K and D.
    axis, form, tau: of a `DecayGenerator`.
    state: the memory before the first token, (B, H, K, D), or None.
    """

    i: Tensor
    e: Tensor
    s: Tensor
    log_k: Optional[Tensor]
    log_d: Optional[Tensor]
    z: Optional[Tensor]
    weight: Optional[Tensor]
    axis: str
    form: str
    tau: float
    state: Optional[Tensor]

    @property
    def z_of_memory(self) -> Optional[Tensor]:
        """z as (B, H, T, K, D), where sizes may be 1."""
        if self.z is None or self.z.ndim == 5:
            return self.z
        return self.z.unsqueeze(-1 if self.axis == 'k' else -2)

    @property
    def full_rank(self) -> bool:
        """Whether the time loop is needed: products of chunks exist for decays of rank one and e, s per token only."""
        return self.z is not None or self.e.ndim == 3 or self.s.ndim == 3


Run = Callable[[RealProblem, str, bool, int], Output]


def per_token(log: Tensor) -> Tensor:
    """Return step logs (H, K) as (1, H, 1, K), and (B, H, T, K) as they are."""
    return log[None, :, None] if log.ndim == 2 else log


def steps_of(log: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
    """Return step logs in canonical shape, clamped, in at least float32."""
    if log is None:
        return None
    log = log[None, :, None] if log.ndim == 2 else log
    return log.to(compute_dtype(dtype)).clamp(STEP_LOG_MIN, 0.0)


def solve(run: Run, i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, scale: float, direction: str,
          state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    """Compute y and, with `output_state`, the last memory by a function that solves a `RealProblem`."""
    if scale != 1:
        s = s * scale
    if oscillation.theta is None:
        return run(_real_problem(i, e, s, oscillation, state), direction, output_state, chunk)
    if is_constant(e, s, oscillation) and not exporting() and not torch.compiler.is_compiling():
        return run_constant(i, e, s, oscillation, DIRECTIONS[direction], state, output_state)
    if e.ndim == 3 or s.ndim == 3 or oscillation.log_o is not None or oscillation.theta.ndim == 3:
        dim = i.shape[3]
        y, state = _solve_complex(run, *_by_channel(i, e, s, oscillation, state), direction, output_state, chunk)
        return _columns(y, dim).mT, None if state is None else _columns(state, dim).mT
    return _solve_complex(run, i, e, s, oscillation, state, direction, output_state, chunk)


def _real_problem(i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, state: Optional[Tensor]) -> RealProblem:
    log_k, log_d = steps_of(oscillation.log_o_k, i.dtype), steps_of(oscillation.log_o_d, i.dtype)
    if log_d is not None and log_d.shape[-1] == 1:                           # one decay for the whole memory
        log_k, log_d = log_d if log_k is None else log_k + log_d, None
    z, weight, axis, form, tau = oscillation.generator or (None, None, 'k', 'exponential', 1.0)
    if oscillation.log_o is not None:
        log = oscillation.log_o
        z, weight = (log, log.new_full((1, 1, 1), -1.0)) if log.ndim == 5 else (log.new_ones(1, 1, 1, 1), -log)
    return RealProblem(i, e, s, log_k, log_d, z, weight, axis, form, float(tau), state)


def _solve_complex(run: Run, i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, state: Optional[Tensor],
                   direction: str, output_state: bool, chunk: int) -> Output:
    theta = oscillation.theta
    # The cosine of a constant step is the same in both directions; other angles differ from one to the other.
    if direction == 'both' and (theta.ndim == 4 or e.is_complex() or s.is_complex()):
        y, back = (_solve_complex(run, i, e, s, oscillation, None, name, False, chunk)[0]
                   for name in ('forward', 'reverse'))
        product = s * e
        diagonal = (product.real if product.is_complex() else product).sum(-1, keepdim=True)
        return y + back - diagonal * i, None
    angle = phases(theta, i.shape[2], direction == 'reverse')
    real = oscillation._replace(theta=None)
    e, s = (_rotated(x, angle, conjugate).to(i.dtype) for x, conjugate in ((e, True), (s, False)))
    # Rows of the memory are doubled, and their step logs with them.
    if real.log_o_k is not None and real.log_o_k.shape[-1] > 1:
        real = real._replace(log_o_k=torch.cat([real.log_o_k] * 2, -1))
    state = None if state is None else _state_to_real(state)
    y, state = run(_real_problem(i, e, s, real, state), direction, output_state, chunk)
    if output_state:
        state = _state_to_complex(state, angle[:, :, 0 if direction == 'reverse' else -1])
    return y, state


def phases(theta: Tensor, length: int, reverse: bool) -> Tensor:
    """Return the angles from the line's start to each token, or from each token to its end: (B, H, T, K) of steps
    theta (B, H, T, K) or (H, K).

    Angles add up in float64: in float32 they would be off by 4e-3 after 65,536 steps of one radian. What exporters
    write runs on shorter lines, and where there may be no float64."""
    steps = per_token(theta).to(compute_dtype(theta.dtype) if exporting() else torch.float64)
    steps = steps.expand(*steps.shape[:2], length, steps.shape[-1])
    return steps.flip(2).cumsum(2).flip(2) if reverse else steps.cumsum(2)


def _rotated(x: Tensor, angle: Tensor, conjugate: bool) -> Tensor:
    """Return 2 K real channels, such that the product of those of s_t and e_j is Re(s_t e_j e^{i (angle_t - angle_j)}).

    They are the real and imaginary parts of x e^{i angle}, or with `conjugate` of the conjugate of x e^{-i angle}."""
    real, imaginary = (x.real, -x.imag if conjugate else x.imag) if x.is_complex() else (x, None)
    dtype = compute_dtype(real.dtype)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    if imaginary is None:
        return torch.cat([real * cos, real * sin], -1)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)


def _state_to_real(state: Tensor) -> Tensor:
    """Return a memory (B, H, K, D) in the coordinates of `_rotated` for angles of 0: (B, H, 2 K, D)."""
    if not state.is_complex():
        return torch.cat([state, torch.zeros_like(state)], 2)
    return torch.cat([state.real, -state.imag], 2)


def _state_to_complex(state: Tensor, angle: Tensor) -> Tensor:
    """Invert `_state_to_real` for a memory that has turned by `angle` (B, H, K) since."""
    real, imaginary = state.chunk(2, 2)
    cos, sin = (x.to(state.dtype).unsqueeze(-1) for x in (angle.cos(), angle.sin()))
    return torch.complex(real * cos + imaginary * sin, real * sin - imaginary * cos)


def _by_channel(i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, state: Optional[Tensor]) -> Tuple:
    """Make a head of each column of the memory, so that e, s and o may differ from column to column."""
    batch, _, length, dim = i.shape

    def repeated(x: Tensor) -> Tensor:
        """(B, H, T, c), the same for all columns."""
        return x.repeat_interleave(dim, 1)

    def constant(x: Tensor) -> Tensor:
        """(H, K, D), the same for all tokens."""
        return x.mT.flatten(0, 1)

    e, s = (constant(x)[None, :, None].expand(batch, -1, length, -1) if x.ndim == 3 else repeated(x) for x in (e, s))
    log_o_k, log_o_d, log_o, theta, _ = oscillation
    if log_o_d is not None:
        log_o_d = per_token(log_o_d).expand(-1, -1, -1, dim).mT.flatten(1, 2).unsqueeze(-1)
    if log_o_k is not None:
        log_o_k = bounded(repeated(per_token(log_o_k)))
    if log_o is not None:
        log_o = bounded(constant(log_o)[None, :, None])
        log_o_k = log_o if log_o_k is None else log_o_k + log_o
    theta = constant(theta) if theta.ndim == 3 else theta.repeat_interleave(dim, theta.ndim // 2 - 1)
    oscillation = Oscillation(log_o_k, log_o_d, None, theta)
    if state is not None:
        state = state.mT.flatten(1, 2).unsqueeze(-1)
    return i.mT.flatten(1, 2).unsqueeze(-1), e, s, oscillation, state


def _columns(x: Tensor, dim: int) -> Tensor:
    """Return (B, H D, n, 1) as (B, H, D, n)."""
    return x.squeeze(-1).unflatten(1, (-1, dim))


def in_dtypes(backward: Callable[..., Sequence[Tensor]], *args: Any) -> Tuple[Tensor, ...]:
    """Return backward(dy, dfinal, *tensors, ...), each gradient in the dtype of its tensor."""
    grads = backward(*args)
    return tuple(grad if x is None else grad.to(x.dtype) for grad, x in zip(grads, args[2:]))


def empty_gradient(x: Optional[Tensor], like: Tensor) -> Tensor:
    """Return an uninitialized gradient of x, without elements for None."""
    return like.new_empty(0, dtype=compute_dtype(like.dtype)) if x is None else x.new_empty(x.shape)


def unchanged(i: Tensor, others: Sequence[Tensor], keys: int, state: Optional[Tensor], is_complex: bool = False
              ) -> Tuple[Tensor, Tensor]:
    """Return the output and the memory after lines without tokens, or without lines."""
    y, dtype = empty_result(i, *others), compute_dtype(i.dtype)
    dtype = dtype.to_complex() if is_complex else dtype
    if state is None:
        state = i.new_zeros(*i.shape[:2], keys, i.shape[3], dtype=dtype)
    return y, state.to(dtype) + y.sum()


def keys_of(shape: Sequence[int]) -> int:
    """Return K of the shape of e or s, (B, H, T, K) or (H, K, D)."""
    return shape[1 if len(shape) == 3 else 3]


def results(i: Tensor, e: Tensor, y: Tensor, states: Sequence[int], last: bool
            ) -> Tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized results: y, what a backward pass needs, and the last memory if `last`."""
    dtype = compute_dtype(i.dtype)
    final = (*i.shape[:2], keys_of(e.shape), i.shape[3]) if last else (0,)
    return y, i.new_empty(states, dtype=dtype), i.new_empty(final, dtype=dtype)


def loop_flops(i: Sequence[int], e: Sequence[int], direction: str) -> int:
    """Return the operations of a multiplication and addition for each element of each memory."""
    return 2 * torch.Size(i).numel() * keys_of(e) * len(DIRECTIONS[direction])


def own_term(i: Tensor, e: Tensor, s: Tensor) -> Tensor:
    """Return the term of each token itself, Re(s_t * e_t)' i_t, which both directions contain."""
    dtype = compute_dtype(i.dtype)
    i, e, s = (x if x.is_complex() else x.to(dtype) for x in (i, e, s))
    if e.ndim == s.ndim == 4:
        product = (s * e).sum(-1, keepdim=True)
    elif e.ndim == s.ndim == 3:
        product = (s * e).sum(1).unsqueeze(1)
    else:
        tokens, matrix = (e, s) if e.ndim == 4 else (s, e)
        kind = torch.promote_types(tokens.dtype, matrix.dtype)
        product = tokens.to(kind) @ matrix.to(kind)
    return (product.real if product.is_complex() else product) * i
