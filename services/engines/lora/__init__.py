"""LoRA adapters in PEFT's layout, for engines that load them from a folder: pytorch/ and vllm/.

inventory.py      what an engine has, and how requests use it
options.py        the key `engine.lora`, importable without torch
peft_folder.py    reads an adapter in PEFT's layout, and says why it cannot be served
catalog.py        the folder of adapters: names, digests, and what is rejected
adapters.py       which adapters are in memory, which are in use, loading and unloading
"""
