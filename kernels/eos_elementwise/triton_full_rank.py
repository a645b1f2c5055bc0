"""Triton kernels of the recurrence with an oscillation of full rank, as a loop over tokens that generates it:

    m_t = o_t * m_{t-1} + e_t i_t',   y_t = m_t' s_t,   o = exp(log_k[k] + log_d[d] + g(z weight[k, d]))

with g(u) = log(sigmoid(u)) / tau or -u. A program holds a tile of the memory, all K rows and BLOCK_D columns, in
registers, and the weight of the tile beside it. It loads z, a vector for each token, and computes o from both, so that
no tensor of T x K x D numbers exists. Columns do not depend on each other. Two directions are different programs; the
second one leaves out the term of a token itself, which counts once. All arithmetic is float32.

The forward kernel stores the memory before every SPACING tokens. The backward kernel takes these from the last to the
first. It computes the memories of the tokens behind again, and keeps them in a workspace of its own, which its program
uses for all lines that it works on. Then it goes back through these tokens with G_t, the gradient of m_t:

    G_{t-1} = o_t * G_t + s_{t-1} dy_{t-1}',   di = G' e,   de = G i,   ds = m dy,   dlog o = G_t * o_t * m_{t-1}

Nothing is divided by o. Sums over columns are stored for each tile, gradients of e, s and the weight (H, K, D) for each
line, and added by `torch.sum`: no atomic operation.
"""
from typing import List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.numerics import STEP_LOG_MIN
from ..common.tiles import LOG2E
from ..eos_scan.chunks import SPACING
from ..eos_scan.memory_tiles import (
    SIZES,
    Lines,
    broadcast_strides,
    dense,
    load_vector,
    outer,
    place,
    strides,
    total,
)
from ..eos_scan.problem import RealProblem, keys_of

STRIDES = (*(f'{name}_{axis}' for name in ('i', 'e', 's', 'lk', 'ld', 'z') for axis in 'bht'), 'lk_k', 'ld_d', 'z_k',
           'z_d', 'w_h', 'w_k', 'w_d')
# Columns of a tile of the backward kernel, which holds up to nine tiles.
COLUMNS = 16
# Programs of a backward kernel and numbers of their workspace at most.
RESIDENT, WORKSPACE = 2112, 1 << 25
LARGEST, LEAST = tl.constexpr(-STEP_LOG_MIN), tl.constexpr(STEP_LOG_MIN * 1.4426950408889634)


@triton.jit
def _load_z(z, k, d, row, column, z_k, z_d, Z: tl.constexpr):
    """Load z of a token: (K, 1), (1, D) or (K, D), or a number."""
    if Z == 'k':
        return load_vector(z, k * z_k, row)[:, None]
    elif Z == 'd':
        return load_vector(z, d * z_d, column)[None, :]
    elif Z == 'kd':
        return load_vector(z, k[:, None] * z_k + d[None, :] * z_d, row[:, None] & column[None, :])
    else:
        return tl.load(z).to(tl.float32)


@triton.jit
def _generated(z, weight, inverse_tau, FORM: tl.constexpr):
    """Return the step log of z weight in units of log 2, and its derivative in units of 1, zero where it is clamped."""
    u = z * weight
    if FORM == 'sigmoid':
        tail = tl.exp2(tl.abs(u) * -LOG2E)
        log = (tl.minimum(u, 0.0) * LOG2E - tl.log2(1 + tail)) * inverse_tau
        slope = tl.where(u > 0, tail, 1.0) / (1 + tail) * inverse_tau
        return tl.maximum(log, LEAST), tl.where(log < LEAST, 0.0, slope)
    else:
        log = tl.minimum(tl.maximum(u * -LOG2E, LEAST), 0.0)
        return log, tl.where((u >= 0) & (u <= LARGEST), -1.0, 0.0)


@triton.jit
def _oscillation(log, log_k, log_d, k, d, row, column, lk_k, ld_d, LOG_K: tl.constexpr, LOG_D: tl.constexpr):
    """Return o of a token (BLOCK_K, BLOCK_D) from the generated step logs and those of rows and columns."""
    if LOG_K:
        log += load_vector(log_k, k * lk_k, row)[:, None] * LOG2E
    if LOG_D:
        log += load_vector(log_d, d * ld_d, column)[None, :] * LOG2E
    return tl.exp2(log)


@triton.jit(do_not_specialize=(*SIZES, *STRIDES))
def _eos_elementwise_full_fwd_kernel(
        i, e, s, log_k, log_d, z, weight, state, y, states, final, i_b, i_h, i_t, e_b, e_h, e_t, s_b, s_h, s_t,
        lk_b, lk_h, lk_t, lk_k, ld_b, ld_h, ld_t, ld_d, z_b, z_h, z_t, z_k, z_d, w_h, w_k, w_d, inverse_tau,
        lines, heads, length, keys, dim, parts, backwards, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
        SPACING: tl.constexpr, FORM: tl.constexpr, Z: tl.constexpr, LOG_K: tl.constexpr, LOG_D: tl.constexpr,
        E_FULL: tl.constexpr, S_FULL: tl.constexpr, STATE: tl.constexpr, SAVE: tl.constexpr, LAST: tl.constexpr):
    """Run along one line with BLOCK_D columns of the memory per program. y: (directions, B, H, T, D), dense.
    E_FULL, S_FULL: e or s is (H, K, D). Z: the axes of z, 'one' for a number, or '' without."""
    number, line, batch, head, part, reverse = place(tl.program_id(0), lines, heads, parts, backwards)
    k, d = tl.arange(0, BLOCK_K), part * BLOCK_D + tl.arange(0, BLOCK_D)
    row, column = k < keys, d < dim
    cell, exists = k[:, None] * dim + d[None, :], row[:, None] & column[None, :]
    i += batch * i_b + head * i_h
    e += batch * e_b + head * e_h
    s += batch * s_b + head * s_h
    if LOG_K:
        log_k += batch * lk_b + head * lk_h
    if LOG_D:
        log_d += batch * ld_b + head * ld_h
    run = number * lines + line
    y += run * length * dim
    stored = tl.cdiv(length, SPACING)
    own = (number == 0).to(tl.float32)
    memory = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    log, expand, shrink, factor = memory, memory, memory, memory
    if Z != '':
        z += batch * z_b + head * z_h
        factor = load_vector(weight + head * w_h, k[:, None] * w_k + d[None, :] * w_d, exists)
    if Z == 'one':
        log, _ = _generated(_load_z(z, k, d, row, column, z_k, z_d, Z), factor, inverse_tau, FORM)
    if E_FULL:
        expand = load_vector(e, cell, exists)
    if S_FULL:
        shrink = load_vector(s, cell, exists)
    if STATE:
        memory = tl.load(state + line * keys * dim + cell, mask=exists, other=0.0)
    for c in range(0, stored):
        if SAVE:
            tl.store(states + (run * stored + c) * keys * dim + cell, memory, mask=exists)
        for n in range(c * SPACING, tl.minimum(c * SPACING + SPACING, length)):
            t = tl.where(reverse > 0, length - 1 - n, n).to(tl.int64)
            steps = log
            if Z != '' and Z != 'one':
                steps, _ = _generated(_load_z(z + t * z_t, k, d, row, column, z_k, z_d, Z), factor, inverse_tau, FORM)
            if Z != '' or LOG_K or LOG_D:
                memory *= _oscillation(steps, log_k + t * lk_t, log_d + t * ld_t, k, d, row, column, lk_k, ld_d, LOG_K,
                                       LOG_D)
            x = load_vector(i + t * i_t, d, column)
            if E_FULL:
                added = expand * x[None, :]
            else:
                added = outer(load_vector(e + t * e_t, k, row), x)
            seen = memory + own * added
            if S_FULL:
                out = tl.sum(shrink * seen, 0)
            else:
                out = tl.sum(load_vector(s + t * s_t, k, row)[:, None] * seen, 0)
            tl.store(y + t * dim + d, out.to(y.dtype.element_ty), mask=column)
            memory += added
    if LAST:
        tl.store(final + line * keys * dim + cell, memory, mask=exists)


@triton.jit(do_not_specialize=(*SIZES, *STRIDES, 'dy_b', 'dy_h', 'dy_t', 'count'))
def _eos_elementwise_full_bwd_kernel(
        dy, dfinal, i, e, s, log_k, log_d, z, weight, states, workspace, di, de, ds, dlog_k, dlog_d, dz, dweight,
        dstate, dy_b, dy_h, dy_t, i_b, i_h, i_t, e_b, e_h, e_t, s_b, s_h, s_t,
        lk_b, lk_h, lk_t, lk_k, ld_b, ld_h, ld_t, ld_d, z_b, z_h, z_t, z_k, z_d, w_h, w_k, w_d, inverse_tau, count,
        lines, heads, length, keys, dim, parts, backwards, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
        SPACING: tl.constexpr, FORM: tl.constexpr, Z: tl.constexpr, LOG_K: tl.constexpr, LOG_D: tl.constexpr,
        E_FULL: tl.constexpr, S_FULL: tl.constexpr, STATE: tl.constexpr, LAST: tl.constexpr):
    """Compute all gradients of BLOCK_D columns of every line that a program works on, `count` in all.

    di, dlog_d: (directions, B, H, T, D). de, ds, dlog_k: (directions * parts, B, H, T, K), or de and ds (directions, B,
    H, K, D) for e and s (H, K, D). dz as dlog_k or dlog_d, or (directions, B, H, T, K, D); not for a number. dweight:
    (directions, B, H, K, D). workspace: (programs, SPACING, BLOCK_K, BLOCK_D)."""
    k, tile_d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    place_of = k[:, None] * BLOCK_D + tile_d[None, :]
    workspace += tl.program_id(0).to(tl.int64) * SPACING * BLOCK_K * BLOCK_D
    row, stored = k < keys, tl.cdiv(length, SPACING)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        number, line, batch, head, part, reverse = place(index, lines, heads, parts, backwards)
        d = part * BLOCK_D + tile_d
        column = d < dim
        cell, exists = k[:, None] * dim + d[None, :], row[:, None] & column[None, :]
        lead = batch * i_b + head * i_h
        lead_e, lead_s = batch * e_b + head * e_h, batch * s_b + head * s_h
        lead_k, lead_d = batch * lk_b + head * lk_h, batch * ld_b + head * ld_h
        lead_z, lead_dy = batch * z_b + head * z_h, batch * dy_b + head * dy_h
        run = number * lines + line
        columns, rows = run * length * dim + d, ((number * parts + part) * lines + line) * length * keys + k
        own = (number == 0).to(tl.float32)
        grad = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        log, slope, expand, shrink, factor = grad, grad, grad, grad, grad
        sum_e, sum_s, sum_w = grad, grad, grad
        if Z != '':
            factor = load_vector(weight + head * w_h, k[:, None] * w_k + d[None, :] * w_d, exists)
        if Z == 'one':
            log, slope = _generated(_load_z(z + lead_z, k, d, row, column, z_k, z_d, Z), factor, inverse_tau, FORM)
        if E_FULL:
            expand = load_vector(e + lead_e, cell, exists)
        if S_FULL:
            shrink = load_vector(s + lead_s, cell, exists)
        if LAST:
            grad = tl.load(dfinal + line * keys * dim + cell, mask=exists, other=0.0)
        for c in range(0, stored):
            start = (stored - 1 - c) * SPACING
            size = tl.minimum(SPACING, length - start)
            memory = tl.load(states + (run * stored + stored - 1 - c) * keys * dim + cell, mask=exists, other=0.0)
            tl.debug_barrier()                           # all threads have read what the last chunk wrote
            for n in range(0, size):
                tl.store(workspace + n * (BLOCK_K * BLOCK_D) + place_of, memory)
                t = tl.where(reverse > 0, length - 1 - start - n, start + n).to(tl.int64)
                steps = log
                if Z != '' and Z != 'one':
                    steps, _ = _generated(_load_z(z + lead_z + t * z_t, k, d, row, column, z_k, z_d, Z), factor,
                                          inverse_tau, FORM)
                if Z != '' or LOG_K or LOG_D:
                    memory *= _oscillation(steps, log_k + lead_k + t * lk_t, log_d + lead_d + t * ld_t, k, d, row,
                                           column, lk_k, ld_d, LOG_K, LOG_D)
                x = load_vector(i + lead + t * i_t, d, column)
                if E_FULL:
                    memory += expand * x[None, :]
                else:
                    memory += outer(load_vector(e + lead_e + t * e_t, k, row), x)
            tl.debug_barrier()                           # other threads may read the memories than wrote them
            for back in range(0, size):
                n = size - 1 - back
                t = tl.where(reverse > 0, length - 1 - start - n, start + n).to(tl.int64)
                memory = tl.load(workspace + n * (BLOCK_K * BLOCK_D) + place_of)
                steps, change, factor_z = log, slope, grad
                if Z != '' and Z != 'one':
                    factor_z = _load_z(z + lead_z + t * z_t, k, d, row, column, z_k, z_d, Z)
                    steps, change = _generated(factor_z, factor, inverse_tau, FORM)
                o = steps
                if Z != '' or LOG_K or LOG_D:
                    o = _oscillation(steps, log_k + lead_k + t * lk_t, log_d + lead_d + t * ld_t, k, d, row, column,
                                     lk_k, ld_d, LOG_K, LOG_D)
                    memory *= o
                x, out = load_vector(i + lead + t * i_t, d, column), load_vector(dy + lead_dy + t * dy_t, d, column)
                if E_FULL:
                    rate = expand
                else:
                    rate = load_vector(e + lead_e + t * e_t, k, row)[:, None]
                dshrink = (memory + own * (rate * x[None, :])) * out[None, :]
                if S_FULL:
                    sum_s += dshrink
                    shrunk = shrink * out[None, :]
                else:
                    tl.store(ds + t * keys + rows, tl.sum(dshrink, 1), mask=row)
                    shrunk = outer(load_vector(s + lead_s + t * s_t, k, row), out)
                into = grad + own * shrunk
                tl.store(di + t * dim + columns, tl.sum(into * rate, 0), mask=column)
                if E_FULL:
                    sum_e += into * x[None, :]
                else:
                    tl.store(de + t * keys + rows, tl.sum(into * x[None, :], 1), mask=row)
                grad += shrunk
                dlog = grad * memory
                if LOG_K:
                    tl.store(dlog_k + t * keys + rows, tl.sum(dlog, 1), mask=row)
                if LOG_D:
                    tl.store(dlog_d + t * dim + columns, tl.sum(dlog, 0), mask=column)
                if Z == 'one':
                    sum_w += dlog * change
                elif Z != '':
                    dlog *= change
                    sum_w += dlog * factor_z
                    dlog *= factor
                    if Z == 'k':
                        tl.store(dz + t * keys + rows, tl.sum(dlog, 1), mask=row)
                    elif Z == 'd':
                        tl.store(dz + t * dim + columns, tl.sum(dlog, 0), mask=column)
                    else:
                        tl.store(dz + (run * length + t) * keys * dim + cell, dlog, mask=exists)
                if Z != '' or LOG_K or LOG_D:
                    grad *= o
        if E_FULL:
            tl.store(de + run * keys * dim + cell, sum_e, mask=exists)
        if S_FULL:
            tl.store(ds + run * keys * dim + cell, sum_s, mask=exists)
        if Z != '':
            tl.store(dweight + run * keys * dim + cell, sum_w, mask=exists)
        if STATE:
            tl.store(dstate + line * keys * dim + cell, grad, mask=exists)


def _axes(z: Optional[Tensor]) -> str:
    """Return the axes of the memory along which z (B, H, T, K, D) differs; 'k' where it differs by token alone."""
    if z is None:
        return ''
    if z.numel() == 1:
        return 'one'
    return {(True, True): 'kd', (False, True): 'd'}.get((z.shape[3] > 1, z.shape[4] > 1), 'k')


def _vector_strides(x: Tensor) -> List[int]:
    """Return the strides of e or s, (B, H, T, K) or (H, K, D), for batch, head and token."""
    return [0, x.stride(0), 0] if x.ndim == 3 else strides(x)


def _arguments(problem: RealProblem):
    """Return the tensors that both kernels load, their strides, and the constants that follow from them."""
    i, (e, s) = launch.unit_stride(problem.i), (x.contiguous() if x.ndim == 3 else launch.unit_stride(x)
                                                for x in (problem.e, problem.s))
    _, _, _, log_k, log_d, z, weight, _, form, tau, _ = problem
    launch.check_grid(*(x for x in (z, weight) if x is not None), first=-2)
    constants = {'FORM': form, 'Z': _axes(z), 'LOG_K': log_k is not None, 'LOG_D': log_d is not None,
                 'E_FULL': e.ndim == 3, 'S_FULL': s.ndim == 3, 'SPACING': SPACING}
    tensors = [i, e, s, *(i if x is None else x for x in (log_k, log_d, z, weight))]
    return tensors, [
        *strides(i), *_vector_strides(e), *_vector_strides(s), *broadcast_strides(log_k, 4),
        *broadcast_strides(log_d, 4), *broadcast_strides(z, 5), *broadcast_strides(weight, 3), 1 / tau], constants


def forward(problem: RealProblem, direction: str, save: bool, last: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the output, the memories before every SPACING tokens (directions, B, H, chunks, K, D) if `save`, and the
    last memory if `last`. z of the problem is (B, H, T, K, D), where sizes may be 1."""
    (i, *tensors), numbers, constants = _arguments(problem)
    keys = keys_of(problem.e.shape)
    run = Lines('eos_elementwise_full_fwd', i, keys, direction)
    y = run.columns(i, torch.float32 if run.directions > 1 else i.dtype)
    shape, stored = (*i.shape[:2], keys, i.shape[3]), launch.cdiv(i.shape[2], SPACING)
    states = i.new_empty((run.directions, *shape[:2], stored, *shape[2:]) if save else 0, dtype=torch.float32)
    final = i.new_empty(shape if last else 0, dtype=torch.float32)
    _eos_elementwise_full_fwd_kernel[run.programs](
        i, *tensors, dense(problem.state), y, states, final, *numbers, *run.sizes, STATE=problem.state is not None,
        SAVE=save, LAST=last, **constants, **run.constants)
    return total(y).to(i.dtype), states, final


def backward(dy: Tensor, dfinal: Optional[Tensor], problem: RealProblem, states: Tensor, direction: str
             ) -> Tuple[List[Tensor], Tensor]:
    """Return the gradients of i, e, s, log_k, log_d, z and weight, and that of the state, in float32; empty for those
    not given."""
    (i, e, s, *tensors), numbers, constants = _arguments(problem)
    keys, dy = keys_of(e.shape), launch.unit_stride(dy)
    run = Lines('eos_elementwise_full_bwd', i, keys, direction, COLUMNS)
    tile = SPACING * run.constants['BLOCK_K'] * run.constants['BLOCK_D']
    programs = min(run.programs[0], RESIDENT, WORKSPACE // tile)
    axes, memories = constants['Z'], (run.directions, *i.shape[:2], keys, run.dim)
    di = run.columns(i)
    grads = [di.new_empty(memories) if x.ndim == 3 else run.rows(i) for x in (e, s)]
    grads.append(run.rows(i) if constants['LOG_K'] else di.new_empty(0))
    grads.append(run.columns(i) if constants['LOG_D'] else di.new_empty(0))
    grads.append({'k': lambda: run.rows(i), 'd': lambda: run.columns(i), 'kd': lambda: di.new_empty(
        (run.directions, *i.shape[:3], keys, run.dim))}.get(axes, lambda: di.new_empty(0))())
    grads.append(di.new_empty(memories if axes else 0))
    dstate = di.new_empty(0 if problem.state is None else problem.state.shape)
    _eos_elementwise_full_bwd_kernel[(programs,)](
        dy, dense(dfinal), i, e, s, *tensors, states, di.new_empty(programs * tile), di, *grads, dstate, *strides(dy),
        *numbers, run.programs[0], *run.sizes, STATE=problem.state is not None, LAST=dfinal is not None, **constants,
        **run.constants)
    return [total(di), *_reduced(problem, axes, grads)], dstate


def _reduced(problem: RealProblem, axes: str, grads: List[Tensor]) -> List[Tensor]:
    """Add up the gradients of e, s, log_k, log_d, z and weight to their shapes."""
    *most, dz, dweight = grads
    result = [x if given is None else x.sum((0, 1)) if given.ndim == 3 else total(x).sum_to_size(given.shape)
              for given, x in zip(problem[1:5], most)]
    if not axes:
        return [*result, dz, dweight]
    z, weight, dweight = problem.z, problem.weight, dweight.sum((0, 1))
    if axes == 'one':                                                        # dweight is the gradient of z weight
        return [*result, (dweight * weight).sum().view(z.shape), (dweight * z.view(1)).sum_to_size(weight.shape)]
    dz = total(dz)
    if axes != 'kd':
        dz = dz.unsqueeze(-1 if axes == 'k' else -2)
    return [*result, dz.sum_to_size(z.shape), dweight.sum_to_size(weight.shape)]
