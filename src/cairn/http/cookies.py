"""A cookie jar for HTTP clients whose requests are made for several users: it keeps nothing and sends nothing."""

from http.cookiejar import CookieJar, DefaultCookiePolicy


def no_cookies() -> CookieJar:
    """A jar that refuses every cookie. httpx has no switch for that, and would send what one user's answer has set with
    the next user's request."""
    return CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))
