"""Operators for images that are larger than the memory: band by band, with the results of the whole image.

Inputs and outputs are arrays in files, such as `numpy.memmap` or `torch.from_file`, or functions that read and write a
band. What crosses the border of a band is carried exactly: the states of scans, and the pivots and right-hand sides of
trees. There are no gradients.
"""
from .tiled_eos import eos_elementwise_tiled, eos_matmul_tiled
from .tiled_polyline import polyline_scan_tiled
from .tiled_quadtree import quadtree_solve_tiled

__all__ = ['eos_elementwise_tiled', 'eos_matmul_tiled', 'polyline_scan_tiled', 'quadtree_solve_tiled']
