"""Measuring: what `subquad benchmark` compares, and its records."""
