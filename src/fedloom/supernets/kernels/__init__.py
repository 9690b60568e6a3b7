"""Triton kernels of ``fused.py`` and their launches. Only that module imports these, and only where Triton will be used.

Maps are (groups, images, rows, columns, channels), each group dense; every tensor of another group may be the same one (step 0).
A group is one architecture of a masked pass. Sums are in float32 and in a fixed order: a result never depends on chance.
No launch reads anything back, so all of them can be captured in a CUDA graph.

Sizes are not specialised: one compiled kernel serves all widths and batches of a kernel size, stride and precision.
"""

from fedloom.supernets.kernels.depthwise import depthwise_forward
from fedloom.supernets.kernels.depthwise_gradients import depthwise_input_gradient, depthwise_weight_gradient
from fedloom.supernets.kernels.gate import gate_gradient, weighed
from fedloom.supernets.kernels.normalisation import apply, gradients, moments, pooled

__all__ = [
    "apply",
    "depthwise_forward",
    "depthwise_input_gradient",
    "depthwise_weight_gradient",
    "gate_gradient",
    "gradients",
    "moments",
    "pooled",
    "weighed",
]
