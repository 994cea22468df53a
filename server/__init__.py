"""The HTTP server and its pages, on top of `tuner.store`; never imports torch."""
