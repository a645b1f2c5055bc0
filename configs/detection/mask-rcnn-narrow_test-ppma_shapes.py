# Train the small Mask R-CNN with PPMA with a narrower box head: in float16, its weights are smaller than 2 MB.
_base_ = 'mask-rcnn_test-ppma_shapes.py'

model = dict(roi_head=dict(bbox_head=dict(fc_out_channels=96)))
