"""Lets a CUDA build of torchvision be imported beside a CPU build of torch; a .pth file loads it at interpreter start.

Why: SGLang imports torchvision for its image models. The package index has the CUDA build, whose compiled part does not
load without CUDA. torchvision accepts that, and then stumbles: `torchvision._meta_registrations` describes operators
that have not been declared. They are declared here, without an implementation, between those two steps. Where the
compiled part did load (torchvision's own CPU build), it has declared them and nothing is done.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds no module. It is only asked for all of them, and acts when the one comes that needs the operators."""

    def __init__(self) -> None:
        self.library: object = None
        """Declarations last as long as this object of torch."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "torchvision._meta_registrations" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    self.library.define(operator + SIGNATURE)


sys.meta_path.insert(0, DeclareOperators())
