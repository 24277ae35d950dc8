"""The TensorRT-LLM engine: experimental; tested against a stand-in only, never with the real package.

engine.py         the Engine, on TensorRT-LLM's LLM API
encoder.py        the Encoder, on its MultimodalEncoder
factory.py        opens both from a configuration
config.py         the configuration; importable without TensorRT-LLM
resolved_args.py  the arguments in effect, their sources, and their checks
package.py        the installed package: imports, versions, calls
loading.py        loads and shuts down TensorRT-LLM's objects
model_facts.py    model facts from the checkpoint and the arguments

requests/         a request to TensorRT-LLM and back
monitoring/       statistics, metrics and KV events
"""
