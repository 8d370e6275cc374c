"""In the place of torchvision, whose wheels need a torch that is built for GPUs. Ultralytics imports it, and has
what it needs of it itself."""

from types import SimpleNamespace

from ultralytics.utils.nms import TorchNMS

ops = SimpleNamespace(nms=TorchNMS.nms)
