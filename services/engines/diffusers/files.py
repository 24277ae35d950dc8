"""Pictures and clips as files."""

import io
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec

import numpy
from PIL import Image

from services.engines.diffusion import Clip, Drawing, Picture

HAS_MP4 = find_spec("av") is not None
"""True if PyAV, of the extra `diffusion`, is installed."""

_QUALITY = "18"  # x264's constant rate factor, at which compression is hardly seen
_FINEST_RATE = 1000  # of frames per second, as the largest denominator of a fraction


def written(drawing: Drawing, frames: Sequence[Image.Image]) -> Picture | Clip:
    """The drawing's files."""
    width, height = frames[0].size
    if drawing.clip is None:
        return Picture(png(frames[0]), width, height)
    if drawing.clip.is_mp4:
        return Clip(mp4(frames, drawing.clip.frames_per_second), (), width, height)
    return Clip(b"", tuple(png(frame) for frame in frames), width, height)


def png(image: Image.Image) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def mp4(frames: Sequence[Image.Image], frames_per_second: float) -> bytes:
    """The clip as H.264, of one thread, so that the same frames give the same bytes. Raises ValueError if the encoder
    refuses them, as it does an odd width or height.
    """
    import av

    file = io.BytesIO()
    try:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("libx264", Fraction(frames_per_second).limit_denominator(_FINEST_RATE))
            stream.width, stream.height = frames[0].size
            stream.pix_fmt = "yuv420p"
            stream.thread_count = 1
            stream.options = {"crf": _QUALITY}
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(numpy.asarray(frame), "rgb24")))
            container.mux(stream.encode())
    except av.FFmpegError as error:
        raise ValueError(f"the frames cannot be written as MP4: {error}") from error
    return file.getvalue()
