# Train only the classifier of a small PPMA (linear probe), here of one that has been trained on other digits:
#   subquad train test-ppma_mnist5k
#   subquad train test-ppma_digits-probe --weights runs/test-ppma_mnist5k/last.safetensors
_base_ = 'test-ppma_digits.py'

model = dict(trainable='head', label_smoothing=0.)
optim_wrapper = dict(optimizer=dict(lr=1e-2, weight_decay=0.))
