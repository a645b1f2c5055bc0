"""Helpers that every tool shares: errors, output, paths and image files. They import nothing else of `tools`."""
