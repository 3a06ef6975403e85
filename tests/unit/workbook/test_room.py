"""What importing the workbook brings along, and what it leaves to those who need it."""

import subprocess
import sys

HAS_TORCH = "import sys, labkit.workbook.runner; print('torch' in sys.modules)"


def test_the_workbook_comes_without_pytorch():
    done = subprocess.run(
        [sys.executable, "-c", HAS_TORCH], capture_output=True, text=True, check=True
    )

    assert done.stdout == "False\n"
