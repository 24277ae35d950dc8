"""Images: vision tower and encoder.

encoder.py        the Encoder: the encode role of this engine; the encoder's thread
tower.py          image processor, vision tower and projector of a checkpoint
images.py         which models take images, and how many tokens an image has
llava.py          LLaVA's vision and language halves
"""
