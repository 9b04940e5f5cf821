"""What notebooks share: findings and verdicts, figures, and the text that the shipped pair is measured on."""

import sys
from pathlib import Path

# Notebooks read `studies`, which lie beside them in the checkout and are in no wheel; a kernel starts in `notebooks`.
_ROOT = str(Path(__file__).resolve().parents[2])
if Path(_ROOT, "studies").is_dir() and _ROOT not in sys.path:
    sys.path.append(_ROOT)
