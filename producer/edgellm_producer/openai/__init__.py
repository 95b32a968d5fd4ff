"""OpenAI's request and response bodies, mapped onto jobs and replies (used by `batch` and `gateway`)."""
