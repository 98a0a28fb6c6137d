"""Run all kernels in Triton's interpreter, without a GPU, in a separate process.

Triton decides when it is imported whether kernels are compiled. Prints how far each case is from the reference.
"""

import json
import os
import sys
from typing import Any


def main() -> int:
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """NumPy 2.4 makes no number of an array with one entry, as the interpreter wants for the ends of loops."""
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched

    import torch

    from descents import CASES, DESCENTS, ROW_SHAPES, ROWWISE, far, far_in_descent, far_in_rows

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    found = {
        "all steps": {name: far(case, cpu) for name, case in CASES.items()},
        "rows": {f"{name} {shape}": [far_in_rows(name, shape, cpu)] for name in ROWWISE for shape in ROW_SHAPES},
        "paper": {name: far_in_descent(name, cpu) for name in DESCENTS},
    }
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
