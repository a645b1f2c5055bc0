# Train MobileViTv2-1.0 with images of several sizes, as in MobileViT's paper: batches of 128 images of 256 x 256, or of
# other sizes with about as many pixels. The two entries of train_dataloader do the same for other widths.
_base_ = 'mobilevitv2-100_8xb128-300e_in1k.py'

train_dataloader = dict(drop_last=False, batch_sampler=dict(
    type='VariableBatchSampler', size=256, sizes=(160, 192, 256, 288, 320)))
