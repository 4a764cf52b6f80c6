"""torchvision, whose builds ask for a torch with CUDA. SGLang and transformers import it for images only."""

from functools import partial

import absent

__version__ = "0.28.0"
__path__: list[str] = []
__getattr__ = partial(absent.look_up, __name__)
_TRANSFORMS = ["transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"]
absent.declare(__name__, ["io", *_TRANSFORMS])
