"""The recurrence has no Triton kernel yet. `kernels.why_not` gives `WHY_NOT` as the reason."""
WHY_NOT = 'it has no Triton kernel.'
