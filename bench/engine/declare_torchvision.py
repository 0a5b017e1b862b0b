"""Makes PyPI's torchvision importable with a CPU build of torch. Run once with the Python that has both.

The wheel's C++ operators are linked against CUDA's torch and do not load; importing then fails because their
schemas are missing. vllm needs the Python half only, so this appends their declaration to
torchvision/extension.py. It imports nothing of this repository: it runs where our packages are not installed.
"""

import importlib.util
import re
from pathlib import Path

spec = importlib.util.find_spec("torchvision")  # found, not imported
assert spec is not None and spec.origin is not None
package = Path(spec.origin).parent
names = re.findall(r'register_fake\("torchvision::(\w+)"\)', (package / "_meta_registrations.py").read_text())
extension = package / "extension.py"
declaration = (
    "\nif not _has_ops():\n"
    '    _schemas = torch.library.Library("torchvision", "DEF")\n'
    f"    for _name in {sorted(set(names))!r}:\n"
    '        _schemas.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")\n'
)
if declaration not in extension.read_text():
    extension.write_text(extension.read_text() + declaration)
