"""The errors inside an error: what a task group has wrapped."""


def causes(error: BaseException) -> list[BaseException]:
    """The errors that task groups wrapped into `error`, however deep; itself, if it is no group."""
    inner: tuple[BaseException, ...] | None = getattr(error, "exceptions", None)
    if inner is None:
        return [error]
    return [cause for one in inner for cause in causes(one)]
