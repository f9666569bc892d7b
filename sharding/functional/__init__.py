"""The functional API: functions of local tensors mapped over a mesh, collectives by axis name,
types, gradients.
"""
