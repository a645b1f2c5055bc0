"""Measuring: what `subquad benchmark` compares, its presets and records, and the tables made of them."""
