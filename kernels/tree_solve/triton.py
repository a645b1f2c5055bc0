"""General trees have no Triton kernel. `kernels.why_not` gives `WHY_NOT` as the reason."""
WHY_NOT = 'it has no Triton kernel.'
