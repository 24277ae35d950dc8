"""What the adapters of engines that transfer KV themselves have in common: vllm/ and trtllm/.

held_kv.py         KV that waits inside such an engine for its reader, and how much of it there is
slow_reader.py     aborts a generation whose answer is not being read
argument_places.py the engine's arguments from several places
logprobs.py        reports of log probabilities, in our words
"""
