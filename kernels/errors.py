"""The one error a kernel raises when it cannot do what it was asked."""


class KernelUnavailableError(RuntimeError):
    """An explicitly chosen kernel cannot run here; the message names it, the reason and what
    can."""
