"""Nothing is registered here: shapes, gradient and operation count are those of the operators of `polyline_scan`."""
