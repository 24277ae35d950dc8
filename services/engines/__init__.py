"""Engines: pytorch/, simulated/, vllm/, sglang/, trtllm/ (experimental), and what they have in common.

base.py           the Protocols of engines, encoders and embedders, facts and load
registry.py       the kinds of engines
context.py        the base of configurations, and what a worker passes to its engine
rules.py          rules of a model for images, vectors and pictures: part of its facts
prompt.py         prompts, media and sampling parameters
bad_words.py      which tokens would complete a sequence that an answer must not have
answer.py         tokens, and the end of a generation
kv_transfer.py    the Protocols of engines that transfer KV themselves
journal/          kept decodes in shared memory, for the next process of a worker
seals.py          seals of blocks that leave a pool, and digests of their contents
kv.py             KV blocks: layout, memory, owners
kv_events.py      events of prefix caches
guidance/         grammars of guided decoding: compiled, and the masks of a step
lora/             adapters: reading them in PEFT's layout, and keeping account of them
running/          generations, test requests, and what engines count
external/         what engines have in common that transfer KV themselves
diffusion.py      the Protocol of engines that draw pictures
diffusers/        the engine of diffusion pipelines
memory/           pools in shared or private memory, and the order in which requests get free blocks
"""
