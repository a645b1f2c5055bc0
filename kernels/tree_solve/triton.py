"""There is no Triton kernel for general trees; `WHY_NOT` is what `kernels.why_not` says of it."""
WHY_NOT = 'it has no Triton kernel.'
