"""Draws every dashboard of deploy/grafana from a run of its own: `make dashboards`."""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tools.dashboards.drawing import draw
from tools.dashboards.run import record

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Runs the load, then writes one picture a dashboard."""
    parser = argparse.ArgumentParser(prog="python -m tools.dashboards", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="of load; the fault is in the middle")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images", help="for the pictures")
    arguments = parser.parse_args()
    temporary = tempfile.TemporaryDirectory(prefix="baton-dashboards-")
    with temporary as folder, record(Path(folder), arguments.seconds) as recording:
        print(asyncio.run(recording.load()), flush=True)
        for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
            picture = arguments.folder / f"dashboard_{path.stem}.png"
            empty = draw(json.loads(path.read_text()), recording, picture)
            print(f"{picture}; without data: {', '.join(empty) or 'none'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
