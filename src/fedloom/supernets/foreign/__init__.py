"""Public networks whose weights can be imported, by space: one module each, with how it names tensors and the images it expects."""

from __future__ import annotations

from fedloom.supernets.foreign import darts, mobilenetv3, nasvit
from fedloom.supernets.foreign.base import PUBLIC

PUBLIC.add("darts", meaning="the search network of DARTS (quark0/darts)")(darts.NETWORK)
PUBLIC.add("mobilenetv3", meaning="the once-for-all MobileNetV3 (mit-han-lab/once-for-all)")(mobilenetv3.NETWORK)
PUBLIC.add("nasvit", meaning="the supernet of NASViT (facebookresearch/NASViT)")(nasvit.NETWORK)
