"""Detection and segmentation by the configs of MMDetection and MMSegmentation."""
