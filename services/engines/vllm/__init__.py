"""The vLLM engine: one AsyncLLM in the worker's process; its core and its workers are child processes.

vLLM is imported by package.py alone, and only when an engine is opened. docs/vllm.md has versions and limits.

config.py         the settings, and the arguments of vLLM
factory.py        opens the engine
engine.py         the Engine itself
package.py        vLLM as it is installed, inspected where versions differ
loading.py        the environment and the arguments that it is started with; what it says about its model
orphans.py        ends vLLM's processes when the worker's process is killed
sleeping.py       the sleep of an idle engine
lora_slots.py     adapters inside vLLM
requests/         one request: sampling, submission, output, abort
handoff.py        the state of a handoff, as a reader gets it
held_kv.py        KV that vLLM holds for readers
monitoring/       statistics, metrics and KV events
inside/           what runs inside vLLM's own processes
"""
