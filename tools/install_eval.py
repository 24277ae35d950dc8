"""Creates the environment of `make eval`: lm-eval beside the packages of the development environment.

lm-eval brings seventy packages that nothing else here needs. It sees torch and transformers of the environment that
runs this, so that they are not there twice: `.venv/bin/python tools/install_eval.py .venv-eval`.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.4.13"


def main() -> int:
    """Creates or completes the environment named on the command line."""
    environment = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-eval")
    if (environment / "complete").exists():
        return 0
    if not (environment / "bin" / "pip").exists():
        venv.create(environment, with_pip=True)
    packages = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A path only: the .pth file of this checkout's editable installation is not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(ROOT / "constraints.txt"), f"lm-eval[api]=={VERSION}"]
    if code := subprocess.run(command, check=False).returncode:
        return code
    (environment / "complete").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
