"""`python -m fake_tensorrt_llm CONFIG key=value...`: `python -m services`, with the stand-in as TensorRT-LLM."""

import os

from fake_tensorrt_llm.installation import installed
from fake_tensorrt_llm.knobs import knobs
from services.__main__ import main

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
with installed(knobs().version):
    main()
