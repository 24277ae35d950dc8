"""The embedded PyTorch engine, on a CPU or a GPU. Only config.py can be imported without torch.

A request goes through these, in this order:

engine.py         the Engine: asynchronous calls into the engine's thread
validation.py     checks of a request before the engine takes it
engine_loop.py    the engine's thread: takes commands, runs steps, delivers results
core.py           the life of requests, and the steps that compute them
steps/            which sequences a step computes, and what follows from its outcome
sequence.py       one request: its tokens, its blocks, its progress
stream.py         the generator that `decode` returns; events of a request that wait for their reader

config.py         the engine's configuration
parts.py          model, pool, memory, tiers and runner, which requests share
preparing.py      the part of a start that needs no GPU, for processes that are forked later
failures.py       PyTorch's exceptions as errors: a failed device, short memory, another; a thread that hangs
part.py           the skeleton of the encoder and the embedder
batch_loop.py     a thread that computes all jobs that wait together, for the encoder and the embedder

runners/          a step of the model: tensors of the batch, CUDA graphs
model/            checkpoints and language models
kernels/          operations of the fused model, in PyTorch and in Triton
kv_cache/         the block pool, its memory, held KV, CUDA IPC
parallel/         a model split among processes: tensor parallelism
lora/             adapters: computing them, several in one step
speculation/      drafts of several tokens, verified in one step
sampling/         choosing the next tokens
vision/           images, vision tower, and the encoder
embedding/        vectors of texts: the embedder
"""
