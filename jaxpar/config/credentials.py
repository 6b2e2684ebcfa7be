"""Credentials in URLs and command lines, which must not reach logs and stored configurations."""

import re

__all__ = ["has_credentials", "masked"]

_MASK = "***"
# user:password@, or a token alone before the @.
_USER_INFO = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@\"']+@")
_NAMES = (
    r"token|access_?token|auth_?token|secret|client_?secret|password|passwd|pwd|api_?key|access_?key(?:_?id)?"
    r"|secret_?(?:access_?)?key|signature|sig|x-amz-(?:signature|credential|security-token)|credentials?"
)
_PARAMETER = re.compile(rf"(?i)(?P<name>(?<![a-z0-9])(?:{_NAMES})[\"']?\s*[=:]\s*[\"']?)(?P<value>[^&\s\"',;}}]+)")
_KNOWN = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{12,}|sk-[A-Za-z0-9-]{16,})\b")


def masked(text: str) -> str:
    """The text with credentials replaced by ***.

    >>> masked("s3://me:hidden@bucket/run?token=abc&region=x")
    's3://***@bucket/run?token=***&region=x'
    >>> masked('data.tokenizer.name="bytes" run.seed=3')
    'data.tokenizer.name="bytes" run.seed=3'
    """
    text = _USER_INFO.sub(rf"\g<scheme>{_MASK}@", text)
    text = _PARAMETER.sub(rf"\g<name>{_MASK}", text)
    return _KNOWN.sub(_MASK, text)


def has_credentials(text: str) -> bool:
    """Whether `masked` would change the text."""
    return masked(text) != text
