"""Parts of an engine that runs, whichever it is.

generation.py      a running generation, which is iterated over or pulled, and aborted by closing it
canary.py          test requests to an idle engine
request_context.py context variables of a request, which engines read
metrics.py         what engines count themselves
"""
