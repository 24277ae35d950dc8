"""Grammars of guided decoding, as routers check them and engines compile them. Nothing here knows gRPC.

| module | subject |
|---|---|
| guide | `Guide`: what a request asks for, as a value |
| schemas | JSON Schemas: their size, their references, and the keywords that cannot be followed |
| bounds | bounds of numbers in JSON Schemas, as the compiler can follow them |
| source | a guide in llguidance's own notation; `check_guide`: all that can be wrong with one, without a vocabulary |
| tasks | slow work in a thread, with a deadline and a bounded queue |
"""
