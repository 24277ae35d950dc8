"""LoRA adapters, several in one step.

peft_folder.py    reads an adapter in PEFT's layout, and says why it cannot be served
catalog.py        the folder of adapters: names, digests, and what is rejected
layers.py         the adapters' matrices on the device, and how layers add them
adapters.py       which adapters are in memory, which are in use, loading and unloading
"""
