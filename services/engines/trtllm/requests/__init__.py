"""A request to TensorRT-LLM and back.

request_builder.py checks a request and builds TensorRT-LLM's arguments
multimodal.py     prompts with images, as TensorRT-LLM takes them
inflight.py       the requests inside TensorRT-LLM: submitted, followed, aborted
results.py        results and handoffs, converted to our values
"""
