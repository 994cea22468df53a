"""The bodies of requests and answers, and the problems that an answer may name."""
