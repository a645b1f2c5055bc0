"""Data sets for classification, sequences and generated shapes. `subquad.tools.data.registry` registers them."""
