"""Config files for classification, sequences, detection and segmentation. Commands of `subquad` find them by name."""
