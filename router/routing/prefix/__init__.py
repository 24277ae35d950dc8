"""The policy predicted_seconds: sends a request where it costs the fewest seconds, given what prefix caches hold.

predicted.py      PredictedSeconds: the policy, and the sum of terms that it compares
rank_costs.py     what a prompt costs at each rank of the workers that could run it
cost.py           the costs of prefill, transfer and decode, learnt online
work.py           the queue of prompts at each rank, and its share of the work
loans.py          what workers could pull of a prompt from one another
forecast.py       compares a placed request with its prediction, and corrects costs and caches
prompt_blocks.py  the names of a prompt's blocks
prefix_caches.py  what each worker's prefix cache holds, reported or estimated
expected_blocks.py  blocks that a cache will report soon, because prompts with them were sent
kv_index.py       which worker holds which blocks
"""
