_base_ = '_base_/ssdlite_mobilevitv2.py'
