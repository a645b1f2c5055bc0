"""What `eos_elementwise` and `eos_matmul` share: the recurrence of the Linear Complexity Sequence Model (Qin et al.,
2024, section 3), its oscillation states, the decay-weighted products of chunks, and argument checks.

    m_t = o_t . m_{t-1} + e_t i_t',   y_t = m_t' s_t

i is the input, e the expand state, o the oscillation state, s the shrink state and m the memory.
"""
from .generator import GENERATOR_FORMS, DecayGenerator

__all__ = ['GENERATOR_FORMS', 'DecayGenerator']
