"""The SGLang engine: its tokenizer manager in the worker's process; scheduler and detokenizer are child processes.

SGLang is imported by package.py alone, and inside its own processes. docs/sglang.md has versions and limits.

config.py         the settings, and the arguments of SGLang
factory.py        opens the engine
engine.py         the Engine itself, an AllocatesFirst, and what it says about its model
package.py        SGLang as it is installed
loading.py        start and end, without what SGLang takes of its process
sampling.py       our sampling parameters in SGLang's words
requests.py       the requests inside SGLang: submitted, followed, aborted, counted
rooms.py          the two sides of a bootstrap room
kv_events.py      the events of its prefix cache, as blocks of our hash chain
metrics.py        the adapter's metrics, and SGLang's own
inside/           what runs inside SGLang's own processes
"""
