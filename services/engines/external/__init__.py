"""The common part of the adapters of engines that transfer KV themselves: vllm/ and trtllm/.

engine.py          the skeleton of such an engine
requests.py        the requests inside it, followed to their end
package.py         imports its package, and checks the version
checkpoint.py      the layout of its KV, from the checkpoint
held_kv.py         KV that waits inside such an engine for its reader, and how much of it there is
slow_reader.py     aborts a generation whose answer is not being read
argument_places.py the engine's arguments from several places
logprobs.py        reports of log probabilities, in our words
"""
