"""LoRA adapters, several in one step. services/engines/lora/ reads them and keeps account of them.

layers.py         the adapters' matrices on the device, and how layers add them
slots.py          the places for adapters of an engine, which its thread fills
"""
