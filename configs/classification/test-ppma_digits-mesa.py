# Train a small PPMA on scikit-learn's handwritten digits, from the sixth epoch on with its own averaged weights as
# teacher (MESA).
_base_ = 'test-ppma_digits.py'

custom_hooks = [dict(type='ModelEMAHook', decay=0.99),
                dict(type='MESAHook', weight=1.0, temperature=1.0, start_epoch=5)]
