"""`python -m services`, with weights that are made up where the checkpoint has none: benchmarks.two_gpus.model."""

import benchmarks.two_gpus.model  # noqa: F401 - replaces the reading of weights
from services.__main__ import main

if __name__ == "__main__":
    main()
