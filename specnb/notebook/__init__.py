"""What notebooks share: findings and verdicts, and figures."""

import sys
from pathlib import Path

# Notebooks read `studies`, which lie beside them in the checkout and are in no wheel; a kernel starts in `notebooks`.
_ROOT = Path(__file__).resolve().parents[2]
if (_ROOT / "studies").is_dir() and str(_ROOT) not in sys.path:
    sys.path.append(str(_ROOT))
