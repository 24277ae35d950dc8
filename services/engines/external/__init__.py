"""The common part of the adapters of engines that transfer KV themselves: vllm/, sglang/ and trtllm/.

engine.py          the skeleton of such an engine
requests.py        the requests inside it, their answers, and reports of log probabilities, in our words
families.py        the metrics of its package
surroundings.py    free ports and the environment, for its start
package.py         imports its package, and checks the version; the layout of its KV, from the checkpoint
held_kv.py         KV that waits inside such an engine for its reader, and how much of it there is
event_reader.py    KV events from sockets, asked for again if lost
cached_chains.py   the prefix cache by those events, in our hash chain
argument_places.py the engine's arguments from several places
"""
