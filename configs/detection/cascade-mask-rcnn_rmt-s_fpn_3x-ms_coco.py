_base_ = 'cascade-mask-rcnn_ppma-s_fpn_3x-ms_coco.py'

# The box heads of Swin's detectors, four convolutions and one linear layer, have the reported parameters and MACs.
model = dict(
    backbone=dict(type='RMT'),
    roi_head=dict(bbox_head=[
        dict(
            type='ConvFCBBoxHead', num_shared_convs=4, num_shared_fcs=1, in_channels=256, conv_out_channels=256,
            fc_out_channels=1024, roi_feat_size=7, num_classes=80, reg_class_agnostic=False, reg_decoded_bbox=True,
            norm_cfg=dict(type='SyncBN'), bbox_coder=dict(type='DeltaXYWHBBoxCoder', target_stds=stds),
            loss_cls=dict(type='CrossEntropyLoss'), loss_bbox=dict(type='GIoULoss', loss_weight=10.))
        for stds in ([0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067])]))
# BatchNorm of the backbone is synchronized between GPUs, too, as published.
sync_bn = 'torch'
