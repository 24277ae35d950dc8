"""The part of the adapter that runs inside SGLang's own processes.

processes.py      their start; one that fails ends alone
draws.py          draws by seeds that do not depend on the rest of the batch
kv_events.py      KV events with the salts of their chains
scheduler.py      a decode engine that computes prompts too, and rooms that end early
"""
