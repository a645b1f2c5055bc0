"""This operator registers nothing: the operators of `polyline_scan` have its shapes, gradient and operation count."""
